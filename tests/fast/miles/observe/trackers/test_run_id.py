"""A run keeps its name in a tracker over its lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles.config import ConfigError
from miles.observe.trackers import run_id


def test_the_name_is_found_again_in_the_same_place_only(tmp_path: Path) -> None:
    assert run_id.known(tmp_path, "wandb", where="a/b") is None
    run_id.keep(tmp_path, "wandb", "1f2e", where="a/b")
    assert run_id.known(tmp_path, "wandb", where="a/b") == "1f2e"
    assert run_id.known(tmp_path, "wandb", where="a/c") is None
    assert run_id.known(tmp_path, "mlflow", where="a/b") is None


@pytest.mark.parametrize("text", ["", "[]", '{"run_id": 3}', '{"run_id": "../x"}', '{"run_id": ""}', "[" * 9999])
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trackers" / "wandb.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"wandb\.json: holds no run id; remove it"):
        run_id.known(tmp_path, "wandb", where="")
