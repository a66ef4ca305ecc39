"""A file name for a unit."""

from __future__ import annotations

import hashlib
import re


def slug(name: str) -> str:
    """A file name for a unit id: readable, short, and different for different ids."""
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[-120:]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
