"""`metrics.jsonl`: what a kill, a full disk and a resume leave in it."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.config import ConfigError
from miles.observe.metrics_log import MetricsLog, MetricsLogError, read_rows, require_steps, rewind


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def fill(path: Path, steps: int) -> list[dict]:
    rows = [{"step": step, "train/loss": step / 7} for step in range(steps)]
    with MetricsLog(path) as log:
        for row in rows:
            log.append(row)
        log.sync()
    return rows


def test_rows_are_read_back_and_a_second_log_appends(path: Path) -> None:
    rows = fill(path, 3)
    with MetricsLog(path) as log:
        log.append({"step": 3, "note": "é"})
    assert read_rows(path) == [*rows, {"step": 3, "note": "é"}]


def test_row_is_on_disk_when_append_returns(path: Path) -> None:
    log = MetricsLog(path)
    log.append({"step": 0})
    assert path.read_text() == '{"step": 0}\n'
    log.close()


def test_numbers_that_json_lacks_are_written_as_words(path: Path) -> None:
    with MetricsLog(path) as log:
        log.append({"step": 0, "a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1.5})
    row = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert row == {"step": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.5}


def test_cut_last_line_is_left_out_and_rewind_removes_it(path: Path) -> None:
    rows = fill(path, 3)
    with path.open("a") as file:
        file.write('{"step": 3, "train/lo')
    assert read_rows(path) == rows
    assert rewind(path, first_dropped_step=3) == rows
    assert read_rows(path) == rows
    assert path.read_text().endswith("\n")


def test_rewind_drops_rows_from_a_step_on_and_the_next_append_continues(path: Path) -> None:
    rows = fill(path, 5)
    assert rewind(path, first_dropped_step=2) == rows[:2]
    with MetricsLog(path) as log:
        log.append({"step": 2})
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2]


def test_rewind_of_no_file_gives_an_empty_one(path: Path) -> None:
    assert rewind(path, first_dropped_step=0) == []
    assert path.read_bytes() == b""


@pytest.mark.parametrize("line", [b"{broken", b"[1]", b'{"no": 1}', b'{"step": "1"}', b"\xff\xfe", b"\x00\x00"])
def test_damaged_line_is_named_with_what_to_do(path: Path, line: bytes) -> None:
    fill(path, 1)
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(MetricsLogError, match=r"metrics\.jsonl:2: .*--fresh"):
        read_rows(path)


@settings(max_examples=40)
@given(rows=st.integers(0, 6), cut=st.integers(0, 300), first_dropped=st.integers(0, 7))
def test_any_cut_leaves_a_prefix_of_whole_rows(
    tmp_path_factory: pytest.TempPathFactory, rows, cut, first_dropped
) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    written = fill(path, rows)
    path.write_bytes(path.read_bytes()[:cut])
    whole = read_rows(path)
    assert whole == written[: len(whole)]
    if len(whole) < first_dropped:
        with pytest.raises(MetricsLogError, match=f"holds {len(whole)} rows, .* needs {first_dropped} "):
            rewind(path, first_dropped_step=first_dropped)
        return
    assert rewind(path, first_dropped_step=first_dropped) == written[:first_dropped]
    assert read_rows(path) == written[:first_dropped]


@pytest.fixture
def size_limit() -> Iterator:
    """Sets the limit on file sizes for this process, and takes it away again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_row_that_does_not_fit_leaves_no_part_of_itself(path: Path, size_limit) -> None:
    rows = fill(path, 3)
    log = MetricsLog(path)
    size_limit(path.stat().st_size + 10)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: the limit on file sizes is reached"):
        log.append({"step": 3, "train/loss": 0.25})
    log.close()
    assert path.read_text().endswith("\n")
    assert read_rows(path) == rows


def test_full_device_is_a_config_error_that_says_so() -> None:
    log = MetricsLog(Path("/dev/full"))
    with pytest.raises(ConfigError, match="the disk is full; free space or choose another folder"):
        log.append({"step": 0})
    log.close()


def test_log_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a part of this path is a file"):
        MetricsLog(tmp_path / "file" / "metrics.jsonl")


def test_rows_that_a_checkpoint_counts_but_the_file_lacks_are_refused_and_nothing_is_changed(path: Path) -> None:
    fill(path, 12)
    before = path.read_bytes()
    with pytest.raises(ConfigError) as raised:
        rewind(path, first_dropped_step=30)
    assert str(raised.value) == (
        f"{path}: holds 12 rows, the checkpoint after step 30 needs 30 (step 12 is the first one missing); restore the "
        "file, or use --fresh to start the run over"
    )
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("steps", "said"), [([0, 2], "step 1 is the first"), ([0, 1, 1, 2], "double"), ([1, 0], "order")]
)
def test_rows_must_be_of_each_step_once_and_in_order(path: Path, steps: list[int], said: str) -> None:
    with pytest.raises(MetricsLogError, match=said):
        require_steps(path, [{"step": step} for step in steps], len(set(steps)) + (said[0] == "s"), needed_by="it")
    require_steps(path, [], 0, needed_by="it")


def test_folder_in_the_place_of_the_log_is_refused_with_a_way_out(path: Path) -> None:
    path.mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: is not a file; move it away, or use --fresh"):
        read_rows(path)
