"""The `miles` command line: exit codes, messages, and what each command prints. Nothing is started here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from miles import cli
from miles.orchestrate import train as train_module
from miles.recipe import load

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")


@pytest.fixture
def miles(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Runs `miles ARGUMENTS` in this process; gives (exit code, stdout, stderr)."""
    monkeypatch.setenv("MILES_RUNS_DIR", str(tmp_path / "runs"))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["miles", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_check_prints_warnings_and_the_digest(miles) -> None:
    code, out, _ = miles("recipe", "check", QUICKSTART, "--set", "validation={status: untested}")
    assert code == 0
    assert "warning: [VALIDATION]" in out
    assert re.search(r"quickstart\.yaml: ok, digest [0-9a-f]{16}$", out.strip())


def test_wrong_key_is_one_line_without_a_traceback_and_exit_code_2(miles) -> None:
    code, out, err = miles("recipe", "check", QUICKSTART, "--set", "algo.entropy_coeff=1")
    assert code == 2
    assert out == ""
    assert err == "error: --set algo.entropy_coeff=1: unknown key 'algo.entropy_coeff'; did you mean 'entropy_coef'?\n"


def test_rule_errors_stop_check_dry_run_and_train_alike(miles) -> None:
    for command in (["recipe", "check"], ["train"], ["train", "--dry-run"]):
        code, _, err = miles(*command, QUICKSTART, "--set", "train.parallel.tp=3")
        assert code == 2
        assert "error: [PARALLEL] train.parallel.tp=3 does not divide the model's 4 attention heads" in err


def test_dry_run_starts_nothing_and_writes_nothing(miles, tmp_path: Path) -> None:
    code, out, _ = miles("train", QUICKSTART, "--dry-run", "--set", "seed=3")
    assert code == 0
    assert "nothing was started with --set seed=3" in out
    assert not (tmp_path / "runs").exists()


def test_show_prints_yaml_that_loads_to_the_same_recipe(miles, tmp_path: Path) -> None:
    code, out, _ = miles("recipe", "show", QUICKSTART, "--set", "seed=5")
    assert code == 0
    assert yaml.safe_load(out)["rollout"]["group_size"] == 16
    (tmp_path / "shown.yaml").write_text(out)
    assert load(tmp_path / "shown.yaml") == load(Path(QUICKSTART), ["seed=5"])


def test_diff_prints_resolved_differences_only(miles, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(f"extends: {QUICKSTART}\nname: other\nrollout:\n  group_size: 4\n  temperature: 1\n")
    code, out, _ = miles("recipe", "diff", QUICKSTART, str(other))
    assert code == 0
    changed = [line for line in out.splitlines() if not line.startswith("validation.")]
    assert changed == ['name: "quickstart" -> "other"', "rollout.group_size: 16 -> 4"]
    assert miles("recipe", "diff", QUICKSTART, QUICKSTART) == (0, "", "")


def test_list_shows_every_recipe_and_refuses_an_empty_folder(miles, tmp_path: Path) -> None:
    code, out, _ = miles("recipe", "list", str(ROOT / "recipes"))
    assert code == 0
    assert len(out.splitlines()) == len(list((ROOT / "recipes").glob("*.yaml")))
    code, _, err = miles("recipe", "list", str(tmp_path))
    assert code == 2
    assert "no *.yaml recipe here" in err


def test_explain_prints_a_rules_reason_and_suggests_for_a_misspelt_one(miles) -> None:
    code, out, _ = miles("recipe", "explain", "PARALLEL")
    assert code == 0
    assert out.startswith("PARALLEL: ")
    code, _, err = miles("recipe", "explain", "PARALEL")
    assert code == 2
    assert err == "error: rule PARALEL is not known; did you mean 'PARALLEL'?\n"
    code, out, _ = miles("recipe", "explain")
    assert code == 0
    assert "SEQ-FIT: " in out


def test_unknown_variable_of_ours_stops_every_command(miles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_RUN_DIR", "x")
    code, _, err = miles("recipe", "check", QUICKSTART)
    assert code == 2
    assert "MILES_RUN_DIR is not known; did you mean 'MILES_RUNS_DIR'?" in err


def test_usage_errors_exit_with_2(miles) -> None:
    assert miles("trian")[0] == 2
    assert miles("train")[0] == 2
    assert miles("train", QUICKSTART, "--no-such-option")[0] == 2
    code, _, err = miles("train", "recipes/quickstrat.yaml")
    assert code == 2
    assert "no such file" in err


def test_interrupted_run_exits_with_130_and_says_how_to_resume(miles, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module, "train", interrupted)
    code, _, err = miles("train", QUICKSTART)
    assert code == 130
    assert "run the same command again to resume" in err


def test_help_is_there_before_any_heavy_library(tmp_path: Path) -> None:
    code = (
        "import sys; from miles.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print('LOADED', sorted({'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "train" in done.stdout
    assert "LOADED []" in done.stdout, done.stderr


@pytest.mark.parametrize("deaf", [False, True])
def test_a_polite_stop_interrupts_also_what_a_script_started_in_the_background(deaf: bool) -> None:
    code = "import os, signal, time\nfrom miles.cli import _end_as_interrupted\n"
    code += "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if deaf else ""
    code += "_end_as_interrupted()\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(20)\n"
    code += "except KeyboardInterrupt:\n    print('interrupted')\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "interrupted\n", done.stderr
