"""The table cadence x labels -> what is admitted."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from miles_ci.cli import main
from miles_ci.errors import UsageError
from miles_ci.registry import load_fleet
from miles_ci.registry.load import read_fleet
from miles_ci.select.policy import CADENCES, Policy, cadence_of_cron
from tests.fast.ci.helpers.trees import PLAIN, REPOSITORY, TODAY, write_tree

FLEET = load_fleet(REPOSITORY / "registry.yaml")
EVERY = frozenset(FLEET.labels.domain)
LONG, SHORT_FT, LONG_FT = "long", "ft-short", "ft-long"


def policy(cadence: str = "regular", *labels: str, all_labels: bool = False) -> Policy:
    return Policy.resolve(FLEET, cadence, labels, all_labels=all_labels)


@pytest.mark.parametrize(
    ("cadence", "labels", "include"),
    [
        ("regular", (), frozenset()),
        ("regular", ("documentation",), frozenset()),
        ("regular", ("run-ci-kernels",), {"kernels"}),
        ("regular", ("run-ci-kernels", "run-ci-long"), {"kernels", LONG}),
        ("regular", ("run-ci-image",), EVERY - {LONG, SHORT_FT, LONG_FT}),
        ("regular", ("run-ci-image", "run-ci-ft-short"), EVERY - {LONG, LONG_FT}),
        ("regular", ("run-ci-all",), EVERY),
        ("regular", ("run-ci-all", "run-ci-image"), EVERY),
        ("regular", ("nightly",), EVERY - {LONG, LONG_FT}),
        ("regular", ("nightly", "run-ci-image"), EVERY - {LONG, LONG_FT}),
        ("regular", ("nightly", "run-ci-long"), EVERY - {LONG_FT}),
        ("nightly", (), EVERY - {LONG, LONG_FT}),
        ("nightly", ("run-ci-image",), EVERY - {LONG, LONG_FT}),
        ("nightly", ("run-ci-all",), EVERY),
        ("weekly", (), EVERY),
        ("weekly", ("run-ci-image",), EVERY),
        ("weekly", ("nightly",), EVERY),
        ("release", (), EVERY),
        ("release", ("nightly", "run-ci-image"), EVERY),
    ],
)
def test_the_included_labels_follow_the_precedence(cadence: str, labels: tuple[str, ...], include: set[str]) -> None:
    assert policy(cadence, *labels).include == include


def test_the_opt_in_of_a_manual_dispatch_includes_every_label_and_stays_regular() -> None:
    found = policy(all_labels=True)
    assert found.include == EVERY
    assert (found.cadence, found.admit_nightly, found.write_baseline) == ("regular", False, False)
    assert not found.use_affected


def test_a_pull_request_with_the_nightly_label_stays_on_its_own_architectures() -> None:
    source = (REPOSITORY / "registry.yaml").read_text(encoding="utf-8")
    nightly = source[source.index("  nightly:\n    crons") :]
    source = source.replace(nightly, nightly.replace("arches: home", "arches: all", 1))
    fleet = read_fleet(source.encode(), today=TODAY).fleet
    assert fleet is not None
    assert fleet.cadences["nightly"].arches == "all"
    labelled = Policy.resolve(fleet, "regular", ["nightly"])
    assert (labelled.admit_nightly, labelled.arches) == (True, "home")
    assert Policy.resolve(fleet, "nightly").arches == "all"


@pytest.mark.parametrize(
    ("cadence", "labels", "expected"),
    [
        ("regular", (), {"admit_nightly": False, "use_affected": True, "bypass_fastfail": False, "write_baseline": False}),
        ("regular", ("run-ci-all",), {"admit_nightly": False, "use_affected": False, "bypass_fastfail": False}),
        ("regular", ("run-ci-image",), {"admit_nightly": False, "use_affected": False, "bypass_fastfail": False}),
        ("regular", ("run-ci-kernels",), {"admit_nightly": False, "use_affected": True}),
        ("regular", ("nightly",), {"admit_nightly": True, "use_affected": False, "bypass_fastfail": True, "write_baseline": False}),
        ("regular", ("bypass-fastfail",), {"bypass_fastfail": True, "use_affected": True}),
        ("nightly", (), {"admit_nightly": True, "use_affected": False, "bypass_fastfail": True, "write_baseline": True, "arches": "home"}),
        ("weekly", (), {"admit_nightly": True, "use_affected": False, "bypass_fastfail": True, "write_baseline": True, "arches": "all"}),
        ("release", (), {"admit_nightly": True, "use_affected": False, "bypass_fastfail": True, "write_baseline": False, "arches": "all"}),
    ],
)  # fmt: skip
def test_what_a_run_may_do_follows_cadence_and_labels(cadence: str, labels: tuple[str, ...], expected: dict) -> None:
    found = policy(cadence, *labels)
    assert {name: getattr(found, name) for name in expected} == expected


def test_requested_labels_are_always_included_and_baselines_never_written_on_a_pull_request() -> None:
    given = ["run-ci-all", "run-ci-image", "nightly", "run-ci-long", "run-ci-kernels", "bypass-fastfail", "other"]
    for cadence in CADENCES:
        for count in range(len(given) + 1):
            for labels in itertools.combinations(given, count):
                found = policy(cadence, *labels)
                assert found.requested <= found.include <= EVERY
                assert found.write_baseline == (cadence in ("nightly", "weekly"))
                assert found.bypass_fastfail == (
                    cadence != "regular" or "bypass-fastfail" in labels or "nightly" in labels
                )


def test_a_subtracted_label_is_no_veto() -> None:
    found = policy("nightly")
    assert found.admits_labels(("long", "kernels"), is_cpu=False)
    assert not found.admits_labels(("long",), is_cpu=False)


def test_a_cpu_test_without_labels_needs_none_and_a_labelled_one_does() -> None:
    assert policy().admits_labels((), is_cpu=True)
    assert not policy().admits_labels((), is_cpu=False)
    assert not policy().admits_labels(("data",), is_cpu=True)
    assert policy("regular", "run-ci-data").admits_labels(("data",), is_cpu=True)


def test_an_unknown_request_warns_with_the_nearest_name_and_other_labels_do_not() -> None:
    found = policy("regular", "run-ci-kernel", "run-ci-quantum", "bug")
    assert found.warnings == (
        "label 'run-ci-kernel' is not known and selects nothing; did you mean 'run-ci-kernels'?",
        "label 'run-ci-quantum' is not known and selects nothing",
    )
    assert found.include == frozenset()


@pytest.mark.parametrize(
    ("label", "warning"),
    [
        ("kernels", "label 'kernels' selects nothing; a run asks for it as 'run-ci-kernels'"),
        ("all", "label 'all' selects nothing; a run asks for it as 'run-ci-all'"),
        ("kernel", "label 'kernel' is not known and selects nothing; did you mean 'run-ci-kernels'?"),
        ("nigthly", "label 'nigthly' is not known and selects nothing; did you mean 'nightly'?"),
        ("foo", "label 'foo' is not known and selects nothing"),
    ],
)
def test_every_label_that_selects_nothing_warns_when_it_was_typed(label: str, warning: str) -> None:
    assert Policy.resolve(FLEET, "regular", [label], typed=True).warnings == (warning,)
    # A pull request carries labels of other trades too.
    assert policy("regular", label).warnings == ()


def test_labels_with_a_meaning_do_not_warn() -> None:
    meant = [*FLEET.labels.scope, *FLEET.labels.behaviour, *(f"run-ci-{name}" for name in FLEET.labels.domain)]
    assert Policy.resolve(FLEET, "regular", meant, typed=True).warnings == ()


def test_plan_prints_the_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tree(tmp_path, {"tests/fast/test_a.py": PLAIN})
    assert main(["plan", "--root", str(tmp_path), "--label", "kernels", "--labels", "foo,run-ci-kernels"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")] == [
        "warning: label 'foo' is not known and selects nothing",
        "warning: label 'kernels' selects nothing; a run asks for it as 'run-ci-kernels'",
    ]


def test_label_order_and_repetition_do_not_matter() -> None:
    assert policy("regular", "nightly", "run-ci-long") == policy("regular", "run-ci-long", "nightly", "nightly")


def test_a_cron_decides_the_cadence_and_an_unknown_one_is_an_error() -> None:
    assert cadence_of_cron(FLEET, "0 15 * * 0-5") == "nightly"
    assert cadence_of_cron(FLEET, "0 15 * * 6") == "weekly"
    with pytest.raises(UsageError, match="belongs to no cadence"):
        cadence_of_cron(FLEET, "0 3 * * *")


def test_an_unknown_cadence_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'nightly'"):
        policy("nigthly")
