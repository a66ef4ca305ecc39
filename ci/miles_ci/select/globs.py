"""Path globs of the registry: `**` crosses folders, `*` and `?` do not; the whole path must match.

`*.md` matches at the top level only, `docs/**` everything below docs, `**` everything.
"""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=1024)
def compile_glob(glob: str) -> re.Pattern[str]:
    pattern = ""
    index = 0
    while index < len(glob):
        if glob.startswith("**/", index):
            pattern += "(?:[^/]+/)*"
            index += 3
        elif glob.startswith("**", index):
            pattern += ".*"
            index += 2
        else:
            character = glob[index]
            pattern += "[^/]*" if character == "*" else "[^/]" if character == "?" else re.escape(character)
            index += 1
    return re.compile(pattern, re.DOTALL)


def matches(path: str, glob: str) -> bool:
    return compile_glob(glob).fullmatch(path) is not None
