"""Readers of what trackers wrote, for these tests and the end-to-end ones."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
