"""Which machines are GitHub's own, thrown away after each job, and which are ours."""

from __future__ import annotations

import re
from collections.abc import Sequence

from miles_ci.registry.model import Fleet

# Names of GitHub's standard images. Everything else, a custom name of a larger runner too, counts as ours.
_IMAGE = re.compile(
    r"ubuntu-(latest|slim|\d\d\.\d\d(-arm)?)|windows-(latest|20\d\d|11-arm)|macos-(latest|\d\d)(-(large|xlarge|intel))?"
)


def is_hosted(labels: Sequence[str]) -> bool:
    """Whether a job with these `runs-on` labels can only land on a machine of GitHub's."""
    return len(labels) == 1 and _IMAGE.fullmatch(labels[0]) is not None


def self_hosted_suites(fleet: Fleet) -> tuple[str, ...]:
    """Suites whose jobs run on machines of ours, in registry order: every GPU suite, and CPU suites by `runs_on`."""
    return tuple(name for name, suite in fleet.suites.items() if suite.backend != "cpu" or not is_hosted(suite.runs_on))
