"""Miles CI: a hardware-aware test registry, planner, runner and GitHub Actions generator.

Needs the standard library and pyyaml (pydantic for the registry model); never imports `miles` or torch.
Start with `miles-ci --help`.
"""

__version__ = "0.1.0"
