"""`miles_weight_loader.load`, as an SGLang server names it: finds this installation of Miles from its own place.

The server's interpreter sees this folder and nothing else of ours, so that no package of our environment comes before
one of its own. `miles.weight_wire` needs torch and pydantic, which SGLang has.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[4]
if "miles" not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        "miles", _ROOT / "__init__.py", submodule_search_locations=[str(_ROOT)]
    )
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["miles"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["miles"])

from miles.weight_wire.server_loader import load  # noqa: E402 - the path to it is made above

__all__ = ["load"]
