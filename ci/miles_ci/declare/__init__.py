"""What a test file says about itself, and the reader of it.

A test file calls these functions at its top level, with literals only. They do nothing when the file is
imported: `scan` reads the calls from the source text (AST), so nothing has to be imported to plan a run,
and a test file needs neither pydantic nor pyyaml to be run by hand.

    from miles_ci.declare import register_cuda_ci

    register_cuda_ci(60, "stage-b-1-gpu-h200", hardware=["h200"], num_gpus=1, labels=["kernels"])

Field rules stand in `miles_ci.declare.fields`; rules that need the fleet (known suite, hardware, labels) in
`miles_ci.select.registrations`. `tests/fast/**` without a call is registered implicitly in `stage-a-cpu`. A backend
that registry.yaml adds has its `register_<backend>_ci` here too, with the fields of `register_cuda_ci`.
"""

from __future__ import annotations

# Not imported from `typing`: that alone would cost half of the 5 ms which this module may take.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from miles_ci.declare.model import Scan

__all__ = [
    "cache_folder",
    "model",
    "register_cpu_ci",
    "register_cuda_ci",
    "register_metric_bound",
    "register_rocm_ci",
    "scan",
    "syntax",
    "tree",
    "vocabulary",
]


def register_cpu_ci(
    est_time: float | None = None,
    suite: str | None = None,
    *,
    labels: Sequence[str] = (),
    nightly: bool = False,
    disabled: Mapping[str, str] | None = None,
    unstable: Mapping[str, str] | None = None,
    timeout: float | None = None,
    split: bool = False,
    serial: bool = False,
    allow_all_skipped: Mapping[str, str] | None = None,
    allow_never_executed: Mapping[str, str] | None = None,
    owner: str | None = None,
) -> None:
    """Run this file in a CPU suite. `est_time` and `timeout` are seconds."""


def register_cuda_ci(
    est_time: float | None = None,
    suite: str | None = None,
    *,
    hardware: Sequence[str] = (),
    num_gpus: int | None = None,
    min_memory_gib: float | None = None,
    capabilities: Sequence[str] = (),
    labels: Sequence[str] = (),
    nightly: bool = False,
    disabled: Mapping[str, str] | None = None,
    unstable: Mapping[str, str] | None = None,
    timeout: float | None = None,
    split: bool = False,
    serial: bool = False,
    allow_all_skipped: Mapping[str, str] | None = None,
    allow_never_executed: Mapping[str, str] | None = None,
    owner: str | None = None,
) -> None:
    """Run this file in a suite on NVIDIA GPUs. `hardware` (models or architectures) is in order of preference."""


def register_rocm_ci(
    est_time: float | None = None,
    suite: str | None = None,
    *,
    hardware: Sequence[str] = (),
    num_gpus: int | None = None,
    min_memory_gib: float | None = None,
    capabilities: Sequence[str] = (),
    labels: Sequence[str] = (),
    nightly: bool = False,
    disabled: Mapping[str, str] | None = None,
    unstable: Mapping[str, str] | None = None,
    timeout: float | None = None,
    split: bool = False,
    serial: bool = False,
    allow_all_skipped: Mapping[str, str] | None = None,
    allow_never_executed: Mapping[str, str] | None = None,
    owner: str | None = None,
) -> None:
    """Run this file in a suite on AMD GPUs; the fields are those of `register_cuda_ci`."""


def register_metric_bound(
    metric: str,
    *,
    steps: str | Sequence[int] = "last",
    magnitude: bool = True,
    rel_up: float | None = None,
    abs_up: float | None = None,
    rel_down: float | None = None,
    abs_down: float | None = None,
    limit: float | None = None,
    warmup: int = 5,
) -> None:
    """Hold a metric that this file records inside a corridor around its trusted history.

    At least one bound is required on each side; an absent bound of a side counts as 0.
    """


def __getattr__(name: str) -> Callable[..., None]:
    """`register_<backend>_ci` of a backend that registry.yaml adds: does nothing, like the others.

    The registry is not read here, so a misspelt name can be imported too; the scan refuses it.
    """
    if name.startswith("register_") and name.endswith("_ci"):
        return register_cuda_ci
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def scan(
    root: Path | str, *, roots: Sequence[str] = ("tests",), backends: Sequence[str] = (), cache_dir: Path | None = None
) -> Scan:
    """Read every declaration under the test roots; `backends`: those that registry.yaml adds.

    Never raises for a faulty file: see `Scan.errors`.
    """
    from miles_ci.declare.tree import scan_tree
    from miles_ci.declare.vocabulary import Vocabulary

    return scan_tree(root, roots=roots, vocabulary=Vocabulary.adding(backends), cache_dir=cache_dir)
