"""The page pool against a model that remembers everything: no page is lost, shared by mistake, or found wrongly."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from miles.rollout.engines.embedded.pages import PAGE, SCRATCH, PagePool

CONTENTS = [b"a", b"b", b"c"]


class PoolMachine(RuleBasedStateMachine):
    """Sequences of page contents are admitted, remembered and ended like requests."""

    @initialize(count=st.integers(4, 12))
    def make(self, count):
        self.pool = PagePool(count, share_prefixes=True)
        self.count = count
        self.live: list[tuple[list[bytes], list[int]]] = []
        self.content_of: dict[int, tuple] = {}
        self.version = 0

    @rule(contents=st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=5))
    def admit(self, contents):
        shared = self.pool.match(self.version, contents)
        for depth, page in enumerate(shared):
            assert self.content_of[page] == (self.version, tuple(contents[: depth + 1])), "found another prefix"
        need = len(contents) - len(shared)
        if need > self.pool.available:
            self.pool.release(shared)
            return
        fresh = self.pool.alloc(need)
        owned = {p for _, pages in self.live for p in pages}
        assert not owned & set(fresh)
        assert SCRATCH not in fresh
        pages = shared + fresh
        for depth, page in enumerate(pages):
            self.content_of[page] = (self.version, tuple(contents[: depth + 1]))
        self.live.append((contents, pages))
        self.pool.remember(self.version, contents, pages)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        index = data.draw(st.integers(0, len(self.live) - 1))
        _, pages = self.live.pop(index)
        self.pool.release(pages)

    @rule()
    def new_version(self):
        self.pool.invalidate()
        self.version += 1
        assert self.pool.cached_tokens == 0

    @invariant()
    def every_page_is_free_or_owned(self):
        owned = {p for _, pages in self.live for p in pages}
        assert self.pool.available == self.count - 1 - len(owned)

    def teardown(self):
        for _, pages in self.live:
            self.pool.release(pages)
        assert len(set(self.pool.alloc(self.count - 1))) == self.count - 1


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_equal_pages_at_different_depths_are_different_prefixes():
    pool = PagePool(8, share_prefixes=True)
    pages = pool.alloc(3)
    pool.remember(0, [b"a", b"a", b"a"], pages)
    assert pool.match(0, [b"a", b"a", b"a", b"a"]) == pages
    assert pool.match(1, [b"a"]) == []
    assert pool.cached_tokens == 3 * PAGE


@pytest.mark.parametrize("share", [True, False])
def test_without_sharing_nothing_is_remembered(share):
    pool = PagePool(4, share_prefixes=share)
    pool.remember(0, [b"a"], pool.alloc(1))
    assert bool(pool.match(0, [b"a"])) is share
