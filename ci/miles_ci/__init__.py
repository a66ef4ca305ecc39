"""A hardware-aware test registry, planner, runner and GitHub Actions generator.

Needs the standard library and pyyaml (pydantic for the registry model); never imports what it tests.
Start with `miles-ci --help`.
"""

__version__ = "0.1.0"
