"""`PagePool`: which cache page belongs to whom, and which full pages can be shared by their content.

Plain bookkeeping; tensors live in `attention`. A cached page is found by (parent page, its tokens), exactly, not by
a hash; the root is the generation of the weights, and a change of them drops everything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

PAGE = 16  # tokens a page
SCRATCH = 0  # page that padding rows write to; never given out


class PagePool:
    """Reference-counted pages 1..count-1. `alloc` and `match` take references, `release` gives them back."""

    def __init__(self, count: int, *, share_prefixes: bool) -> None:
        self.count = count
        self.share_prefixes = share_prefixes
        self._free = list(range(count - 1, SCRATCH, -1))
        self._refs = [0] * count
        self._page_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}
        self._uid_of: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, unreferenced, oldest first
        self._next_uid = 0

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def cached_tokens(self) -> int:
        return len(self._page_of) * PAGE

    def alloc(self, n: int) -> list[int]:
        """`n` private pages; the caller has checked `available`."""
        free, pages = self._free, []
        for _ in range(n):
            if not free:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
                free.append(page)
            page = free.pop()
            self._refs[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            if self._refs[page] == 0:
                del self._idle[page]
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give references back; a cached page stays until its room is needed, later pages of a chain go first."""
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def match(self, root: Hashable, token_pages: Sequence[bytes]) -> list[int]:
        """The longest cached chain for these full pages, with a reference taken on each."""
        found: list[int] = []
        parent: Hashable = ("root", root)
        for content in token_pages:
            page = self._page_of.get((parent, content))
            if page is None:
                break
            found.append(page)
            parent = self._uid_of[page]
        self.share(found)
        return found

    def remember(self, root: Hashable, token_pages: Sequence[bytes], pages: Sequence[int]) -> None:
        """Make full pages findable. Content that is cached already keeps its first page."""
        if not self.share_prefixes:
            return
        parent: Hashable = ("root", root)
        for content, page in zip(token_pages, pages, strict=True):
            key = (parent, content)
            known = self._page_of.get(key)
            if known is None:
                if page in self._key_of:
                    return
                self._page_of[key] = page
                self._key_of[page] = key
                self._uid_of[page] = self._next_uid
                self._next_uid += 1
                known = page
            parent = self._uid_of[known]

    def forget_private(self, pages: Sequence[int]) -> list[int]:
        """Those of the pages that nobody else holds, no longer findable: their content may be spoiled."""
        private = [page for page in pages if self._refs[page] == 1]
        for page in private:
            if page in self._key_of:
                self._forget(page)
        return private

    def invalidate(self) -> None:
        """Forget all cached content; pages in use stay with their owners."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()
        self._uid_of.clear()

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
        del self._uid_of[page]
