"""The root of Miles' errors.

Every error that a user causes or must act on derives from `MilesError`; the command line prints its
text without a traceback and exits with `exit_code`. Each package adds its own subclass beside its code.
"""

from __future__ import annotations


class MilesError(Exception):
    """An error whose text names the place, what is wrong and what to do instead."""

    exit_code = 1


class ConfigError(MilesError):
    """The user's input (file, option, model folder, environment) is wrong. Exit code 2."""

    exit_code = 2
