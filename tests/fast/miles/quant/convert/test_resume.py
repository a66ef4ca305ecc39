"""What a resume compares: the source's files, finished shards, and who else writes; and how a conversion is ended."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from miles.quant.cli import convert_app
from miles.quant.convert.mxfp4_to_fp8 import convert
from miles.quant.convert.shards import SAMPLE
from miles.quant.errors import ConversionError

ROOT = Path(__file__).resolve().parents[5]


@pytest.fixture
def interrupted(mxfp4_checkpoint, tmp_path: Path) -> tuple[Path, Path]:
    """A source whose shards are larger than their sample, and a target that only lacks COMPLETE."""
    source, target = mxfp4_checkpoint(m=512, n=1024), tmp_path / "out"
    assert (source / "model-0.safetensors").stat().st_size > 4 * SAMPLE
    convert(source, target)
    (target / "COMPLETE").unlink()
    return source, target


def change_bytes(path: Path, at: int, count: int = 200) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(count)
        file.seek(at)
        file.write(bytes(byte ^ 1 for byte in old))


def test_a_source_that_changed_outside_its_sample_is_noticed(interrupted) -> None:
    source, target = interrupted
    path = source / "model-0.safetensors"
    change_bytes(path, path.stat().st_size // 4)
    with pytest.raises(ConversionError, match="cannot resume, source_files differ"):
        convert(source, target, resume=True)


@pytest.mark.parametrize("complete", [False, True])
def test_a_finished_shard_whose_bytes_changed_is_written_again(
    complete: bool, interrupted, tmp_path: Path, digest
) -> None:
    source, target = interrupted
    if complete:
        convert(source, target, resume=True)
    convert(source, tmp_path / "whole")
    change_bytes(target / "model-1.safetensors", 5000)
    assert not convert(source, target, resume=True).get("already_complete")
    assert digest(target) == digest(tmp_path / "whole")


def test_resuming_what_is_complete_ends_well_and_writes_nothing(interrupted) -> None:
    source, target = interrupted
    convert(source, target, resume=True)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir() if path.name != "journal.jsonl"}
    done = CliRunner().invoke(convert_app, ["mxfp4-to-fp8", str(source), str(target), "--resume"])
    assert (done.exit_code, "already complete" in done.output) == (0, True), done.output
    assert before == {path.name: path.stat().st_mtime_ns for path in target.iterdir() if path.name != "journal.jsonl"}
    other = CliRunner().invoke(
        convert_app, ["mxfp4-to-fp8", str(source), str(target), "--resume", "--on-loss", "report"]
    )
    assert "cannot resume, options differ" in str(other.exception)


def test_check_reads_every_byte_when_asked(interrupted, tmp_path: Path) -> None:
    source, target = interrupted
    convert(source, target, resume=True)
    journal = (target / "journal.jsonl").read_bytes()
    done = CliRunner().invoke(convert_app, ["check", str(target), "--bytes"])
    assert (done.exit_code, "3 shards are as they were written" in done.output) == (0, True), done.output
    change_bytes(target / "model-1.safetensors", 5000)
    assert CliRunner().invoke(convert_app, ["check", str(target)]).exit_code == 0
    failed = CliRunner().invoke(convert_app, ["check", str(target), "--bytes"])
    assert "model-1.safetensors: not as the conversion wrote it; run that again with --resume" in str(failed.exception)
    assert (target / "journal.jsonl").read_bytes() == journal
    (target / "journal.jsonl").unlink()
    failed = CliRunner().invoke(convert_app, ["check", str(target), "--bytes"])
    assert "has no journal.jsonl to compare its shards with; leave --bytes out" in str(failed.exception)


@pytest.mark.parametrize("text", ["[]\n", "5\n", '"a"\n'])
def test_a_journal_that_is_none_is_refused(text: str, interrupted) -> None:
    source, target = interrupted
    (target / "journal.jsonl").write_text(text)
    with pytest.raises(
        ConversionError, match=r"journal\.jsonl is no journal of a conversion; choose another directory"
    ):
        convert(source, target, resume=True)


def test_journal_lines_without_their_fields_count_as_not_done(interrupted, tmp_path: Path, digest) -> None:
    source, target = interrupted
    convert(source, tmp_path / "whole")
    journal = target / "journal.jsonl"
    head, *shards = journal.read_text().splitlines()
    shards[0] = json.dumps({"shard": "model-0.safetensors"})
    journal.write_text("\n".join([head, *shards]) + "\n")
    convert(source, target, resume=True)
    assert digest(target) == digest(tmp_path / "whole")


def test_a_folder_named_like_a_temporary_file_is_left_alone(interrupted) -> None:
    source, target = interrupted
    (target / "mine.tmp").mkdir()
    convert(source, target, resume=True)
    assert (target / "mine.tmp").is_dir()


def test_two_conversions_do_not_write_to_one_target(interrupted) -> None:
    source, target = interrupted
    (target / "model-0.safetensors.tmp").write_text("the other one's")
    other = os.open(target, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ConversionError, match="another conversion writes there; wait for it to end"):
        convert(source, target, resume=True)
    assert (target / "model-0.safetensors.tmp").exists()
    os.close(other)
    convert(source, target, resume=True)


def test_a_target_that_another_conversion_filled_meanwhile_is_not_gone_on_with(
    mxfp4_checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miles.quant.convert import run

    source, target = mxfp4_checkpoint(), tmp_path / "out"
    planned = run.require_trained_rounding

    def meanwhile(*arguments) -> None:
        monkeypatch.setattr(run, "require_trained_rounding", planned)
        convert(source, target)
        planned(*arguments)

    monkeypatch.setattr(run, "require_trained_rounding", meanwhile)
    with pytest.raises(ConversionError, match="is COMPLETE already"):
        convert(source, target)


SLOW = """
import sys, time
from miles.quant.convert import mxfp4_to_fp8
convert_on = mxfp4_to_fp8._convert_on
def slow(*arguments):
    time.sleep(0.3)
    return convert_on(*arguments)
mxfp4_to_fp8._convert_on = slow
from miles import cli
sys.argv = ["miles", "convert", "mxfp4-to-fp8", *sys.argv[1:]]
cli.main()
"""


def test_a_termination_cleans_up_and_says_how_to_go_on(mxfp4_checkpoint, tmp_path: Path) -> None:
    source, target = mxfp4_checkpoint(), tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", SLOW, str(source), str(target)]
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 100
        while not list(target.glob("*.tmp")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "run the same command with --resume" in said
    assert not list(target.glob("*.tmp"))
    convert(source, target, resume=True)


def test_folders_that_are_not_copied_are_told_and_broken_links_are_refused(mxfp4_checkpoint, tmp_path: Path) -> None:
    source = mxfp4_checkpoint()
    (source / "original").mkdir()
    done = CliRunner().invoke(convert_app, ["mxfp4-to-fp8", str(source), str(source / "out")])
    assert done.exit_code == 0, done.output
    assert "not copied, folders of the source: original\n" in done.output
    assert json.loads((source / "out" / "report.json").read_text())["folders_not_copied"] == ["original"]
    (source / "vocab.json").symlink_to("nowhere")
    with pytest.raises(ConversionError, match=r"vocab\.json: a link to a file that is not there; .*or remove the link"):
        convert(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_link_to_a_file_that_is_there_is_copied_as_the_file(mxfp4_checkpoint, tmp_path: Path) -> None:
    source: Path = mxfp4_checkpoint()
    for name in ("model-0.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
        (source / name).unlink()
        (source / name).symlink_to(tmp_path / name)
    convert(source, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
