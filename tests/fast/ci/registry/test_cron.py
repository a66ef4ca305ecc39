"""Crons that can be read and fire, and those that cannot or never do."""

from __future__ import annotations

import pytest

from miles_ci.registry.cron import cron_problem


@pytest.mark.parametrize(
    "cron",
    [
        "0 15 * * 0-5",
        "*/5 * * * *",
        "5/10 0 1 1 0",
        "0 0 * 2 *",
        "0 0 29 2 *",
        "0 0 28-31 2 *",
        "0 0 30,1 2 *",
        "0 0 30 2,3 *",
        "0 0 */31 2 *",
        "0 0 31 */2 *",
        "0 0 31 4/1 *",
        "0 0 30 2 1",
    ],
)
def test_a_cron_that_fires_is_accepted(cron: str) -> None:
    assert cron_problem(cron) is None


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("0 0 30 2 *", "never fires"),
        ("0 0 31 4 *", "never fires: no month '4' has a day '31'"),
        ("0 0 31 4,6,9,11 *", "never fires"),
        ("0 0 31 4/5 *", "never fires"),
        ("0 0 30-31 2 */2", "never fires"),
        ("60 0 * * *", "outside 0-59"),
        ("0 0 5-3 * *", "runs backwards"),
        ("0 0 */0 * *", "outside"),
        ("0 0 1- * *", "cannot read the day '1-'"),
    ],
)
def test_a_cron_that_cannot_be_meant_is_named(cron: str, words: str) -> None:
    assert words in str(cron_problem(cron))
