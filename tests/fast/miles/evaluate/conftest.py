"""The stand-in for an engine is the rollout's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout" / "helpers"))
