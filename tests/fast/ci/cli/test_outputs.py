"""`--out PATH`: files are replaced whole, everything else is written into, and no folder is invented."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from miles_ci.errors import ExitCode
from miles_ci.files import write_output
from tests.fast.ci.helpers.trees import REPOSITORY

MERGED = REPOSITORY / "docs/ci/cards/example-merged.json"


def command(name: str, tree: Path, run) -> list[str]:
    """A command line that ends before the value of `--out`."""
    if name == "plan":
        return ["plan"]
    assert run("plan", "--suite", "stage-b-cpu", "--out", str(tree / "planned.json"))[0] == 0
    (tree / "none").mkdir(exist_ok=True)
    return ["results", "merge", "--plan", str(tree / "planned.json"), str(tree / "none")]


def call(run, tree: Path, words: list[str]) -> tuple[int, str, str]:
    """`results` has no --root and no --today."""
    if words[0] == "plan":
        return run(*words)
    done = subprocess.run([sys.executable, "-m", "miles_ci", *words], cwd=REPOSITORY, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["plan", "merge"])
def test_a_pipe_is_written_into_and_stays_a_pipe(run, tree: Path, name: str) -> None:
    words = command(name, tree, run)
    pipe = tree / "pipe"
    os.mkfifo(pipe)
    # Both ends are held here, so that neither side waits for the other.
    reader = os.open(pipe, os.O_RDWR)
    read: list[bytes] = []
    thread = threading.Thread(target=lambda: read.append(os.read(reader, 1 << 20)))
    thread.start()
    call(run, tree, [*words, "--out", str(pipe)])
    thread.join(timeout=20)
    os.close(reader)
    assert read[0].startswith(b"{")
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


@pytest.mark.parametrize("name", ["plan", "merge"])
def test_a_link_stays_and_what_it_leads_to_is_replaced(run, tree: Path, name: str) -> None:
    words = command(name, tree, run)
    target, link = tree / "target.json", tree / "link.json"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("target.json")
    call(run, tree, [*words, "--out", str(link)])
    assert link.is_symlink()
    assert json.loads(target.read_text())
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["plan", "merge"])
def test_a_missing_folder_is_named_and_not_made(run, tree: Path, name: str) -> None:
    words = command(name, tree, run)
    code, _, err = call(run, tree, [*words, "--out", str(tree / "new/deep/file.json")])
    assert (code, "no such folder" in err, str(tree / "new/deep") in err) == (2, True, True)
    assert not (tree / "new").exists()


def test_a_report_is_written_by_the_same_rules(tree: Path) -> None:
    (tree / "link.md").symlink_to("card.md")
    for out, expected in ((tree / "link.md", 1), (tree / "new/card.md", 2)):
        words = ["report", str(MERGED), "--form", "pr", "--out", str(out)]
        done = subprocess.run(
            [sys.executable, "-m", "miles_ci", *words], cwd=REPOSITORY, capture_output=True, text=True
        )
        assert done.returncode == expected, done.stderr
    assert (tree / "link.md").is_symlink()
    assert (tree / "card.md").is_file()
    assert f"no such folder to write into; make it first: '{tree / 'new'}'" in done.stderr


def test_a_folder_is_no_output(run, tree: Path) -> None:
    code, _, err = run("plan", "--out", str(tree))
    assert (code, "a folder; name a file in it" in err) == (2, True)


def test_our_own_output_under_another_name_keeps_both_texts(tree: Path) -> None:
    """`miles-ci plan --out FILE > FILE`, which is what `--out /dev/stdout > FILE` comes to."""
    path = tree / "both"
    with path.open("wb") as stream:
        words = [sys.executable, "-m", "miles_ci", "plan", "--root", str(tree), "--out", str(path)]
        subprocess.run(words, cwd=REPOSITORY, stdout=stream, check=True)
    first, rest = path.read_text().split("\n", 1)
    assert json.loads(first)["digest"]
    assert rest.startswith("cadence regular")


def test_a_full_disk_names_the_file_that_was_asked_for(run, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (tree / "plan.json").write_text("old")
    code, _, err = run("plan", "--out", str(tree / "plan.json"))
    assert code == ExitCode.INFRA
    assert err.strip().endswith(f"No space left on device: '{tree / 'plan.json'}'")
    assert (tree / "plan.json").read_text() == "old"


def test_a_link_in_a_circle_is_an_error_and_no_endless_search(tree: Path) -> None:
    (tree / "a").symlink_to("b")
    (tree / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        write_output(tree / "a", b"x")


@pytest.mark.parametrize(
    "words",
    [["tune"], ["metric-bound", "list"], ["metric-bound", "show"], ["metric-bound", "promote"], ["results", "flaky"]],
    ids=" ".join,
)
def test_a_mistyped_history_is_no_such_store_and_none_is_made(tree: Path, words: list[str]) -> None:
    place = [str(tree)] if words[0] == "results" else ["--root", str(tree)]
    for address in (f"{tree}/foo", f"sqlite:{tree}/nope/x.db"):
        line = [sys.executable, "-m", "miles_ci", *words, *place, "--history", address]
        done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True)
        assert (done.returncode, "no such store" in done.stderr) == (2, True), done.stderr
    assert [path.name for path in (tree / "foo", tree / "nope") if path.exists()] == []


def test_files_are_named_from_here_or_from_the_root_and_the_shard_that_holds_one_is_told(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from miles_ci import cli

    (tree / "tests/fast/test_b.py").write_text("def test_b():\n    assert True\n")
    monkeypatch.chdir(tree / "tests/fast")
    for path in ("test_a.py", "tests/fast/test_a.py"):
        words = ["run", "--suite", "stage-a-cpu", "--shard", "1/2", "--file", path]
        codes = [cli.main([*words[:4], f"{index}/2", *words[5:], "--results", str(tree / "out")]) for index in (1, 2)]
        assert sorted(codes) == [0, 2]
        wrong = codes.index(2) + 1
        assert (
            f"--file tests/fast/test_a.py: is in shard {3 - wrong}/2 of suite 'stage-a-cpu', not in {wrong}/2"
            in capsys.readouterr().err
        )
        assert cli.main(["explain", path]) == 0
        assert "tests/fast/test_a.py in stage-a-cpu: included" in capsys.readouterr().out


def test_an_output_that_takes_no_more_is_named_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from miles_ci import cli

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert cli.main(["--version"]) == ExitCode.INFRA
    assert capsys.readouterr().err == "miles-ci: standard output: No space left on device\n"
