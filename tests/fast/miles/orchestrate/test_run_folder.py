"""Run folders: where a run lives, who may use it, what must not be lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from miles.config import ConfigError
from miles.orchestrate.errors import RunFolderError
from miles.orchestrate.run_folder import RunFolder, claimed, locate
from miles.recipe.schema import Recipe, digest

Make = Callable[..., Recipe]


def test_a_run_without_overrides_has_the_recipes_name(recipe: Make, tmp_path: Path) -> None:
    assert locate(recipe(), []).path == tmp_path / "runs" / "tiny"


def test_overrides_give_a_folder_of_their_own_and_the_same_command_finds_it_again(recipe: Make) -> None:
    seeded = recipe(seed=1)
    folder = locate(seeded, ["seed=1"])
    assert folder.path.name == f"tiny-{digest(seeded)[:8]}"
    assert locate(seeded, ["seed=1"]) == folder
    assert locate(recipe(seed=2), ["seed=2"]) != folder


def test_a_given_name_is_taken_as_it_is(recipe: Make) -> None:
    assert locate(recipe(name="mine", seed=1), ["seed=1", "name=mine"]).path.name == "mine"


def test_runs_folder_comes_from_recipe_then_environment_then_default(
    recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Recipe(name="tiny")
    assert locate(plain, []).path == Path("runs/tiny")
    monkeypatch.setenv("MILES_RUNS_DIR", "/elsewhere")
    assert locate(plain, []).path == Path("/elsewhere/tiny")
    assert locate(recipe(), []).path.parent.name == "runs"
    assert locate(recipe(), []).path.is_relative_to("/elsewhere") is False


def test_claim_records_the_resolved_recipe_and_its_digest(recipe: Make) -> None:
    made = recipe()
    with claimed(locate(made, []), made, fresh=False) as folder:
        stored = json.loads(folder.recipe.read_text())
        assert stored["digest"] == digest(made)
        assert digest(Recipe.model_validate_json(json.dumps(stored["recipe"]))) == digest(made)
        assert folder.logs.is_dir()
        assert folder.checkpoints.is_dir()
    with claimed(folder, made, fresh=False):
        pass


def test_second_claim_is_refused_naming_the_holder_and_a_way_out(recipe: Make) -> None:
    made = recipe()
    folder = locate(made, [])
    with claimed(folder, made, fresh=False):
        with pytest.raises(RunFolderError, match=rf"process id {os.getpid()} is using this folder.*--set name=NAME"):
            with claimed(folder, made, fresh=True):
                pass
        assert folder.recipe.exists()
    with claimed(folder, made, fresh=False):
        pass


def _hold(path: Path, made: Recipe, ready) -> None:
    with claimed(RunFolder(path), made, fresh=False):
        ready.set()
        signal_never = multiprocessing.Event()
        signal_never.wait(30)


def test_a_killed_holder_does_not_keep_the_folder(recipe: Make) -> None:
    made, context = recipe(), multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(locate(made, []).path, made, ready))
    holder.start()
    assert ready.wait(20)
    with pytest.raises(RunFolderError, match=f"process id {holder.pid} "):
        with claimed(locate(made, []), made, fresh=False):
            pass
    holder.kill()
    holder.join()
    with claimed(locate(made, []), made, fresh=False):
        pass


def test_folder_of_another_recipe_is_refused_with_the_difference(recipe: Make) -> None:
    first, second = recipe(), recipe(rollout={"group_size": 4})
    with claimed(locate(first, []), first, fresh=False):
        pass
    with pytest.raises(RunFolderError, match=r"another recipe \(rollout.group_size: 16 -> 4\); use --fresh"):
        with claimed(locate(second, []), second, fresh=False):
            pass
    with claimed(locate(second, []), second, fresh=True) as folder:
        assert json.loads(folder.recipe.read_text())["digest"] == digest(second)


def test_fresh_removes_the_earlier_run(recipe: Make) -> None:
    made = recipe()
    with claimed(locate(made, []), made, fresh=False) as folder:
        (folder.checkpoints / "iter_1").mkdir()
        folder.metrics.write_text("{}")
        folder.result.write_text('{"line": "done"}')
        assert folder.read_result() == {"line": "done"}
    with claimed(folder, made, fresh=True):
        assert folder.read_result() is None
        assert not folder.metrics.exists()
        assert list(folder.checkpoints.iterdir()) == []


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_that_is_no_run_is_never_emptied(recipe: Make, fresh: bool) -> None:
    made = recipe()
    folder = locate(made, [])
    folder.path.mkdir(parents=True)
    (folder.path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        with claimed(folder, made, fresh=fresh):
            pass
    assert (folder.path / "thesis.txt").exists()


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "null", '{"line": 3}', "\udcff"])
def test_result_that_is_none_is_refused_with_both_ways_on(recipe: Make, text: str) -> None:
    made = recipe()
    with claimed(locate(made, []), made, fresh=False) as folder:
        folder.result.write_text(text, errors="surrogateescape")
        with pytest.raises(
            RunFolderError, match=r"result\.json: is not the result .*; remove it and run the same .*--fresh"
        ):
            folder.read_result()
        folder.result.unlink()
        folder.result.mkdir()
        with pytest.raises(RunFolderError, match=r"result\.json: is not the result of a run \(IsADirectoryError\)"):
            folder.read_result()


@pytest.mark.parametrize("fresh", [False, True])
def test_folder_in_the_place_of_the_recipe_is_refused_and_never_emptied(recipe: Make, fresh: bool) -> None:
    made = recipe()
    folder = locate(made, [])
    (folder.recipe / "work").mkdir(parents=True)
    with pytest.raises(RunFolderError, match=r"recipe\.json: is a folder, where a run keeps a file; move it away, or"):
        with claimed(folder, made, fresh=fresh):
            pass
    assert (folder.recipe / "work").is_dir()


@pytest.mark.parametrize(
    "text", ["{broken", "{}", "[]", "null", '{"recipe": 3}', '{"recipe": {"name": "x", "gone": 1}}']
)
def test_recipe_of_another_version_is_named_with_a_way_out(recipe: Make, text: str) -> None:
    made = recipe()
    folder = locate(made, [])
    folder.path.mkdir(parents=True)
    folder.recipe.write_text(text)
    with pytest.raises(RunFolderError, match=r"cannot be read as a recipe of this version.*--fresh"):
        with claimed(folder, made, fresh=False):
            pass


def test_unwritable_places_are_config_errors_that_name_path_and_fix(recipe: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = recipe(run={"directory": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match=r"file/tiny: a part of this path is a file; choose another folder"):
        with claimed(locate(below, []), below, fresh=False):
            pass
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").write_text("")
    with pytest.raises(ConfigError, match=r"runs/tiny: a file of this name is in the way"):
        with claimed(locate(recipe(), []), recipe(), fresh=False):
            pass


def test_a_started_process_does_not_inherit_the_lock(recipe: Make) -> None:
    made = recipe()
    with claimed(locate(made, []), made, fresh=False):
        child = subprocess.Popen(["sleep", "30"], close_fds=False)
    try:
        with claimed(locate(made, []), made, fresh=False):
            assert child.poll() is None, "the folder is free although the child lives"
    finally:
        child.kill()
        child.wait()


def test_a_run_keeps_its_folder_on_another_cluster_and_with_other_trackers(recipe) -> None:
    here = locate(recipe(), [])
    assert locate(recipe(cluster={"address": "head:6379"}), ["cluster.address=head:6379"]) == here
    assert locate(recipe(seed=1), ["seed=1", "cluster.wait_s=5"]) == locate(recipe(seed=1), ["seed=1"])
    assert locate(recipe(observe={"trackers": []}), ["observe.trackers=[]"]) == here
