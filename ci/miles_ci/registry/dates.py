"""How long an exemption may live: `until` at most 90 days ahead, an error two weeks after it has passed."""

from __future__ import annotations

from datetime import date

from miles_ci.errors import UsageError
from miles_ci.registry.yaml_source import Document, Keys

MAX_DAYS_AHEAD = 90
GRACE_DAYS = 14


def until_problem(until: str, today: date) -> tuple[str, str, str] | None:
    """(code, message, severity) for an `until` date that is impossible, too far, or has passed; else None.

    The day itself still counts. A passed date is a warning for 14 days, so that expiry never turns an
    unrelated pull request red on the morning it happens.
    """
    try:
        last = date.fromisoformat(until)
    except ValueError:
        return "bad-date", f"'{until}' is no day of the calendar", "error"
    ahead = (last - today).days
    if ahead > MAX_DAYS_AHEAD:
        return "until-too-far", f"{until} is {ahead} days ahead; at most {MAX_DAYS_AHEAD} are allowed", "error"
    if ahead < -GRACE_DAYS:
        return "until-expired", f"{until} passed {-ahead} days ago: fix it, or renew it with a new reason", "error"
    if ahead < 0:
        left = GRACE_DAYS + ahead
        return "until-expired", f"{until} has passed; becomes an error in {left + 1} day(s)", "warning"
    return None


def check_until(document: Document, keys: Keys, until: str, today: date) -> None:
    """Report the problem of a date in the registry, if it has one."""
    problem = until_problem(until, today)
    if problem is not None:
        code, message, severity = problem
        document.error(keys, code, f"{'.'.join(map(str, keys))}: {message}", severity=severity)


def parse_day(text: str, option: str) -> date:
    """A date given on the command line. Raises `UsageError`."""
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: not a date YYYY-MM-DD") from error
