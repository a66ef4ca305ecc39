"""Every pinned string against the table that is shipped in registry.yaml, plain and coloured."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_ci.errors import UsageError
from miles_ci.registry import load_fleet
from miles_ci.run.judge import retry
from miles_ci.run.judge.retry import Classification, Evidence, FailedTest, RetryRow, classify

ROOT = Path(__file__).resolve().parents[5]


@pytest.fixture(scope="module")
def table() -> tuple[RetryRow, ...]:
    return retry.rows_from(load_fleet(ROOT / "registry.yaml").retry)


def failed(exception: str, output: str = "", *, asserted: bool = False) -> FailedTest:
    return FailedTest("tests/x.py::test_a", [exception], output, asserted)


def coloured(text: str) -> str:
    return "".join(f"\x1b[31m{character}\x1b[0m" if character != " " else " " for character in text)


OF_A_TEST = [
    ("ValueError: there is room for improvement", "test", "none"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "test", "none"),
    ("torch.cuda.OutOfMemoryError: CUDA out of memory.", "test", "none"),
    ("RuntimeError: NCCL error: unhandled system error", "infra", None),
    ("RuntimeError: NCCL communicator was aborted on rank 3", "infra", None),
    ("torch.distributed.DistBackendError: NCCL error: unhandled system error, NCCL version 2.27.3", "infra", None),
    ("requests.exceptions.HTTPError: HTTP 503 for url: https://host/file", "infra", "retry"),
    ("urllib.error.HTTPError: HTTP Error 503: Service Unavailable", "infra", "retry"),
    ("requests.exceptions.HTTPError: 429 Too Many Requests", "infra", "retry"),
    ("ValueError: timeout must be positive", "test", "none"),
    ("requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out.", "infra", "retry"),
    ("RuntimeError: CUDA error 802: system not yet initialized", "infra", "stop_host"),
    ("RuntimeError: CUDA error: 802", "infra", "stop_host"),
    ("RuntimeError: driver reported Xid 79", "infra", "stop_host"),
    ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "test", "none"),
    ("OSError: [Errno 28] No space left on device", "infra", "stop_host"),
    ("OSError: listen EADDRINUSE: address already in use :::8000", "infra", "retry"),
    ("OSError: [Errno 98] Address already in use", "infra", "retry"),
    ("ConnectionResetError: [Errno 104] Connection reset by peer", "infra", "retry"),
    ("ValueError: Xid 790", "test", "none"),
    ("ValueError: CUDA error 8020", "test", "none"),
]  # fmt: skip


@pytest.mark.parametrize("dress", [str, coloured])
@pytest.mark.parametrize(("exception", "kind", "action"), OF_A_TEST)
def test_pinned_exception_has_its_class_in_every_dress(table, exception, kind, action, dress):
    found = classify(Evidence([failed(dress(exception))]), table)
    assert found.kind == kind
    if action is not None:
        assert found.action == action


@pytest.mark.parametrize("dress", [str, coloured])
@pytest.mark.parametrize(
    ("output", "kind"),
    [("NCCL error: unhandled system error", "infra"), ("kernel: NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off", "infra"),
     ("No space left on device", "infra"), ("Connection reset by peer", "test"), ("HTTP 503", "test")],
)  # fmt: skip
def test_own_assertion_is_overruled_by_strong_rows_only(table, output, kind, dress):
    own = failed("AssertionError: assert 1 == 0", dress(output), asserted=True)
    assert classify(Evidence([own]), table).kind == kind


def test_status_code_in_an_assertion_is_no_download_failure(table):
    own = failed("AssertionError: assert 503 == 200", "got HTTP 503", asserted=True)
    assert classify(Evidence([own]), table).kind == "test"


def test_oom_has_a_class_of_its_own(table):
    assert classify(Evidence([failed("torch.OutOfMemoryError: CUDA out of memory")]), table).name == "oom"


def test_death_by_sigkill_is_host_oom_unless_we_sent_it(table):
    assert classify(Evidence(exit_code=137, signal=9), table).name == "host-oom"
    assert classify(Evidence(exit_code=137, signal=9), table).kind == "infra"
    assert classify(Evidence(exit_code=137, signal=9, timed_out=True), table).kind == "timeout"


def test_segmentation_fault_is_the_tests_own(table):
    found = classify(Evidence(exit_code=139, signal=11), table)
    assert (found.kind, found.action) == ("test", "none")


def test_other_exit_codes_that_contain_the_digits_do_not_match(table):
    assert classify(Evidence(exit_code=1137), table).name == "test"


def test_log_stands_in_only_where_no_test_could_report(table):
    log = "\n".join(["Connection reset by peer"])
    assert classify(Evidence(log_tail=log), table).kind == "infra"
    assert classify(Evidence([failed("ValueError: mine")], log_tail=log), table).kind == "test"


def test_only_the_last_two_hundred_lines_of_the_log_count(table):
    early = "Connection reset by peer\n" + "quiet\n" * 200
    assert classify(Evidence(log_tail=early), table).kind == "test"
    assert classify(Evidence(log_tail="Connection reset by peer\n" + "quiet\n" * 199), table).kind == "infra"


def test_one_real_failure_among_infrastructure_failures_makes_it_a_test_failure(table):
    tests = [failed("ConnectionResetError: Connection reset by peer"), failed("ValueError: mine")]
    assert classify(Evidence(tests), table).kind == "test"


def test_sick_host_is_never_hidden_by_other_failures(table):
    tests = [failed("ValueError: mine"), failed("RuntimeError: CUDA error 802")]
    assert classify(Evidence(tests), table).action == "stop_host"


def test_timeout_without_another_cause_is_a_timeout(table):
    assert classify(Evidence(timed_out=True, log_tail="still training"), table).kind == "timeout"
    assert classify(Evidence(timed_out=True, log_tail="NCCL error: unhandled system error"), table).kind == "infra"


def test_first_matching_row_wins():
    rows = (
        RetryRow("a", "test", ("exception",), "boom", "none", 1),
        RetryRow("b", "infra", ("exception",), "boom", "retry", 2),
    )
    assert classify(Evidence([failed("E: boom")]), rows).name == "a"
    assert classify(Evidence([failed("E: boom")]), rows[::-1]).name == "b"


def test_patterns_are_bounded_by_words():
    rows = (RetryRow("oom", "infra", ("exception",), "oom", "retry", 2),)
    assert classify(Evidence([failed("E: room for zoom")]), rows).kind == "test"
    assert classify(Evidence([failed("E: oom!")]), rows).kind == "infra"


def test_exception_rows_do_not_look_at_output():
    rows = (RetryRow("x", "infra", ("exception",), "boom", "retry", 2),)
    assert classify(Evidence([failed("E: other", "boom")]), rows).kind == "test"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "weather"}, "retry.r.kind: 'weather' is not one of"),
        ({"where": ("mail",)}, "retry.r.where: 'mail' is not one of"),
        ({"action": "pray"}, "retry.r.action: 'pray' is not one of"),
        ({"max_attempts": 0}, "max_attempts: 0, must be at least 1"),
        ({"pattern": "("}, "retry.r.pattern: not a regular expression"),
    ],
)
def test_faulty_row_is_refused_by_name(change, message):
    fields = {"name": "r", "kind": "infra", "where": ("exit",), "pattern": "1", "action": "none", "max_attempts": 1}
    with pytest.raises(UsageError, match=r"retry\.r") as caught:
        RetryRow(**{**fields, **change})
    assert message in str(caught.value)


def test_retries_are_limited_in_number_and_by_how_much_failed():
    cause = Classification("x", "infra", "retry", 2)
    assert cause.allows(1)
    assert not cause.allows(2)
    assert not Classification("x", "infra", "stop_host", 2).allows(1)
    assert not Classification("x", "infra", "retry_other_host", 2).allows(1)
    assert retry.may_retry(3, 1)
    assert not retry.may_retry(4, 10)
    assert retry.may_retry(20, 100)
    assert not retry.may_retry(21, 100)
