"""Text from outside as a terminal may show it: nothing in it moves the cursor, colours, hides or reorders."""

from __future__ import annotations

import unicodedata

# Joiners that scripts and emoji need; every other invisible character is shown as its number.
_JOINERS = "\u200c\u200d"


def visible(text: str) -> str:
    """Control, format and unassigned characters as their number, such as `\\x1b`; line ends and tabs stay."""
    return "".join(c if c in "\n\t" or c in _JOINERS or not _hidden(c) else _escaped(c) for c in text)


def _hidden(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
