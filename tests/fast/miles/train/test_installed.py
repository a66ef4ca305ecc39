"""A machine without megatron-core is told so in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from miles.config import ConfigError
from miles.train import installed


def test_it_is_here_and_looking_imports_nothing() -> None:
    code = "import sys; from miles.train.installed import require; require(); print('megatron' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("module", ["megatron.no_such_core", "no_such_megatron.core", "json.decoder.core", "sys.core"])
def test_what_is_missing_is_one_line_with_the_way_out(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(installed, "MODULE", module)
    with pytest.raises(ConfigError, match="training needs megatron-core, which is not installed") as caught:
        installed.require()
    assert "\n" not in str(caught.value)
    assert "container" in str(caught.value)
