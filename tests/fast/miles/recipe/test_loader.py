"""From files and overrides to a Recipe: what wins, where faults are reported, what every shipped recipe must do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from miles.config import ConfigError
from miles.orchestrate.dry_run import describe, parameter_count
from miles.recipe import Recipe, digest, load
from miles.rollout.engines.sglang.interpreter import NEEDED_ROUTES

ROOT = Path(__file__).resolve().parents[4]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def with_stand_in_server(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The recipe in this interpreter, which finds a package named sglang: its own environment need not be built here."""
    server = folder / "sglang" / "srt" / "entrypoints" / "http_server.py"
    server.parent.mkdir(parents=True)
    write(folder / "sglang" / "__init__.py", "")
    write(server, "\n".join(f"@app.post({route!r})\ndef route{at}(): ..." for at, route in enumerate(NEEDED_ROUTES)))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"python": None})})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipe_loads_and_its_dry_run_prints_the_plan(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load(path)
    assert recipe.description, f"{path}: say in one line what this recipe does"
    if recipe.engine.engine == "sglang":
        recipe = with_stand_in_server(recipe, tmp_path, monkeypatch)
    describe(recipe, [], Console(width=200))
    printed = capsys.readouterr().out
    assert f"{parameter_count(recipe):,} parameters" in printed
    assert "nothing was started" in printed


def test_shipped_recipes_have_the_names_of_their_files() -> None:
    assert RECIPES
    assert [load(path).name for path in RECIPES] == [path.stem for path in RECIPES]


def test_dry_run_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from pathlib import Path; from rich.console import Console\n"
        "from miles.recipe import load; from miles.orchestrate.dry_run import describe\n"
        "describe(load(Path('recipes/quickstart.yaml')), [], Console())\n"
        "print('LOADED', sorted({'torch', 'ray', 'transformers', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "LOADED []" in done.stdout, done.stderr


def test_extends_merges_sections_and_the_file_wins_over_its_base(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "name: base\nseed: 3\nrollout:\n  group_size: 8\n  batch_groups: 4\n")
    top = write(tmp_path / "top.yaml", "extends: base.yaml\nname: top\nrollout:\n  group_size: 2\n")
    recipe = load(top)
    assert (recipe.name, recipe.seed) == ("top", 3)
    assert (recipe.rollout.group_size, recipe.rollout.batch_groups) == (2, 4)


def test_override_wins_over_file_and_base_and_the_last_one_counts(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "name: base\nseed: 3\n")
    top = write(tmp_path / "top.yaml", "extends: base.yaml\nname: top\nseed: 4\n")
    assert load(top).seed == 4
    assert load(top, ["seed=5", "seed=6"]).seed == 6


def test_environment_never_changes_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "r.yaml", "name: r\n")
    before = digest(load(path))
    monkeypatch.setenv("MILES_RUNS_DIR", "/elsewhere")
    monkeypatch.setenv("MILES_NO_COLOR", "1")
    assert digest(load(path)) == before


def test_a_file_of_own_code_begins_at_the_recipe_s_folder_also_from_an_override(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("name: base\nalgo: {advantage: 'python:own/a.py:f'}\n")
    (tmp_path / "r.yaml").write_text("extends: base.yaml\nname: r\n")
    recipe = load(tmp_path / "r.yaml", ["algo.loss=python:own/b.py:g"])
    assert recipe.algo.advantage == f"python:{tmp_path}/own/a.py:f"
    assert recipe.algo.loss == f"python:{tmp_path}/own/b.py:g"


def test_a_chain_of_extends_is_refused_with_its_place(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "name: a\n")
    write(tmp_path / "b.yaml", "extends: a.yaml\nname: b\n")
    top = write(tmp_path / "c.yaml", "name: c\nextends: b.yaml\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:2:1: b\.yaml itself extends a\.yaml; only one level is allowed"):
        load(top)
    with pytest.raises(ConfigError, match=r"d\.yaml:1:1: extends names one recipe file"):
        load(write(tmp_path / "d.yaml", "extends: [a.yaml]\nname: d\n"))
    with pytest.raises(ConfigError, match=r"nope\.yaml: no such file"):
        load(write(tmp_path / "e.yaml", "extends: nope.yaml\nname: e\n"))


def test_fault_is_reported_where_its_value_was_written(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "name: base\nrollout:\n  group_siz: 8\n")
    top = write(tmp_path / "top.yaml", "extends: base.yaml\nname: top\nseed: -1\n")
    with pytest.raises(ConfigError) as raised:
        load(top, ["train.optimiser.lr=2", "run.steps=many"])
    lines = str(raised.value).splitlines()
    assert len(lines) == 4
    assert any("base.yaml:3:3: unknown key 'rollout.group_siz'; did you mean 'group_size'?" in line for line in lines)
    assert any("top.yaml:3:1: seed: input should be greater than or equal to 0, got -1" in line for line in lines)
    assert any(
        "--set train.optimiser.lr=2: unknown key 'train.optimiser'; did you mean 'optimizer'?" in line for line in lines
    )
    assert any("--set run.steps=many: run.steps: input should be a valid integer, got 'many'" in line for line in lines)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["rollout.group_size=1"], "raise rollout.group_size to 2 or more"),
        (["train.parallel.sp=true"], "needs tp > 1"),
        (["cluster.address='ray://head:10001'"], "start it there with the address host:port of the head, or auto"),
        (
            ["cluster.address=head"],
            "cluster.address: 'head' is no address of a Ray cluster; use host:port, auto, or local",
        ),
        (["cluster.address='head:70000'"], "is no address of a Ray cluster"),
        (["data.held_out_fraction=0"], "or set eval.sets to []"),
        (["validation={status: validated}"], "needs validation.hardware and validation.date"),
        (["expect={x: {}}"], "needs min, max or both"),
        (["name=../up"], "name: string should match pattern"),
        (["schema_version=2"], "schema_version: 2 is not allowed; use 1"),
        (["seed=1.5"], "seed: input should be a valid integer"),
        (["algo.kl.where=loss", "algo.kl.coef=0.1"], "use k2"),
    ],
)
def test_impossible_combination_is_refused_with_what_to_use(sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(ROOT / "recipes" / "quickstart.yaml", sets)
    assert said in str(raised.value)
    assert raised.value.exit_code == 2


def test_resolved_recipe_written_as_yaml_is_the_same_recipe(tmp_path: Path) -> None:
    recipe = load(ROOT / "recipes" / "quickstart.yaml", ["seed=7"])
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    again = load(write(tmp_path / "again.yaml", text))
    assert again == recipe
    assert digest(again) == digest(recipe)
