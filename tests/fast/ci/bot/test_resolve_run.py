"""Which dependencies a run tests: any name of docker/images.yaml, and no other."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles_ci.bot.dependency_checkouts import Dependency, load_dependencies, perform
from miles_ci.bot.directives import parse_directives
from miles_ci.bot.resolve_run import Resolved, resolve_commits, resolve_run
from miles_ci.cli import main
from miles_ci.errors import UsageError

KNOWN = {name: Dependency(name, "https://host/x", Path("/x"), ".", Path("/p")) for name in ("engine", "train-core")}
ENTRY = "{origin: https://host/x, path: /x, install: ., patches: p}"


def ask(dependency: Dependency, target) -> str:
    return f"{dependency.name}@{target.text}"


def run(body: str = "", **dispatch: str) -> Resolved:
    """With an image tag, so that no image of the registry is looked up."""
    chosen = {name.replace("_", "-"): value for name, value in dispatch.items()} | {"ci-image-tag": "v1"}
    fleet = SimpleNamespace(images={"x": SimpleNamespace(repository="host/x", build_args={}, key_files=["a"])})
    return resolve_run(
        body=body, dispatch=chosen, cadence="regular", fork=False, root=Path("."), fleet=fleet, image="x",
        dependencies=KNOWN, registry=None, ask=ask,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/images.yaml").write_text("images:\n  x: {dockerfile: docker/D, base: host/b}\n")


def test_every_named_dependency_becomes_a_commit_in_one_json_object() -> None:
    found = run("ci-engine-pr: #7\nci-train-core-pr: dev\n")
    assert json.loads(found.outputs()["dependency_commits"]) == {"engine": "engine@#7", "train-core": "train-core@dev"}
    assert "| engine | engine@#7 | description |" in found.summary()
    assert "| engine | the image’s copy | image default |" in run().summary()


def test_a_dispatched_directive_wins_over_the_description() -> None:
    assert run("ci-engine-pr: #7", ci_engine_pr="#8").commits == {"engine": "engine@#8"}


@pytest.mark.parametrize(
    ("body", "dispatch", "message"),
    [
        ("ci-engin-pr: #7", {}, "dependency 'engin' is not in docker/images.yaml; known: engine, train-core; did you mean 'engine'?"),
        ("", {"ci_other_pr": "#1"}, "dependency 'other' is not in docker/images.yaml"),
        ("", {"ci_engine": "#1"}, "ci-engine (dispatch) is not a directive"),
        ("", {"ci_engine_pr": "a..b"}, "ci-engine-pr (dispatch): expected #NUMBER"),
    ],
)  # fmt: skip
def test_what_no_file_of_ours_names_is_refused(body: str, dispatch: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(body, **dispatch)
    assert message in str(caught.value)


def test_an_approval_with_an_unknown_dependency_is_refused_too() -> None:
    with pytest.raises(UsageError, match="known: engine, train-core"):
        resolve_commits(parse_directives("ci-foo-pr: #1"), KNOWN, ask)


def test_a_step_on_a_dependency_that_is_not_in_the_file_touches_nothing() -> None:
    with pytest.raises(UsageError, match="dependency 'foo'"):
        perform("checkout", KNOWN, {"foo": "a" * 40}, run=lambda command: pytest.fail("started a command"))


def test_a_repository_without_the_file_has_no_dependencies_and_a_name_that_no_directive_can_say_is_refused(
    tmp_path,
) -> None:
    assert load_dependencies(tmp_path / "elsewhere") == {}
    place = tmp_path / "docker/images.yaml"
    place.write_text(f"dependencies:\n  train-core: {ENTRY}\n")
    assert list(load_dependencies(tmp_path)) == ["train-core"]
    place.write_text(f"dependencies:\n  Engine_2: {ENTRY}\n")
    with pytest.raises(UsageError, match=r"dependencies\.Engine_2: a name is words of small letters"):
        load_dependencies(tmp_path)


@pytest.mark.parametrize("text", ['["a"]', '{"engine": 1}', "nonsense", '{"a": "b", "a": "c"}'])
def test_commits_that_are_no_object_of_texts_are_refused(tmp_path, monkeypatch, capsys, text: str) -> None:
    monkeypatch.setenv("DEPENDENCY_COMMITS", text)
    assert main(["images", "dependencies", "checkout", "--root", str(tmp_path)]) == 2
    assert "DEPENDENCY_COMMITS" in capsys.readouterr().err
