"""`miles-ci` (also `python -m miles_ci`): one table of subcommands, each imported only when it is called.

A subcommand is a module in `miles_ci.commands` (its docstring is the help text) with two functions:

    add_arguments(parser: argparse.ArgumentParser) -> None
    main(args: argparse.Namespace) -> int          # the exit code

Errors derived from `CiError` end the program with their text and exit code, without a traceback.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import sys
from collections.abc import Sequence

from miles_ci.errors import CiError, ExitCode, suggestion

PROGRAM = "miles-ci"

# name -> (module, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("miles_ci.commands.init", "write a first registry.yaml into a repository that has none"),
    "lint": ("miles_ci.commands.lint", "check registry.yaml, every declaration and the committed generated files"),
    "list": ("miles_ci.commands.list", "show suites with their tests, estimates and machines"),
    "plan": ("miles_ci.commands.plan", "select tests and divide them into shards"),
    "explain": ("miles_ci.commands.explain", "why each test runs or does not, with the deciding line"),
    "run": ("miles_ci.commands.run", "run a suite, a shard or a file"),
    "results": ("miles_ci.commands.results", "merge results of shards and find tests that were never executed"),
    "metric-bound": ("miles_ci.commands.metric_bound", "evaluate metric bounds, show and promote their history"),
    "tune": ("miles_ci.commands.tune", "learn durations, report drift, rewrite est_time"),
    "simulate": ("miles_ci.commands.simulate", "queue times and utilisation of the fleet under load"),
    "doctor": ("miles_ci.commands.doctor", "what this machine has, which suites run here, and why the rest do not"),
    "generate": ("miles_ci.commands.generate", "write the GitHub workflows from registry.yaml"),
    "simulate-workflow": ("miles_ci.commands.simulate_workflow", "which workflow jobs would run for an event, and why"),
    "bot": ("miles_ci.commands.bot", "jobs of the comment bots (used by the workflows)"),
    "report": ("miles_ci.commands.report", "analyse results and write status cards"),
    "images": ("miles_ci.commands.images", "content keys of images, edits and patches"),
}


# A path that is wrong is the caller's; these are not.
_MACHINE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    try:
        code = _main(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output (a pager, `head`) went away: what we had to say is lost, so this is no success.
        from miles_ci.files import drop_output

        drop_output(sys.stdout)
        return ExitCode.INTERRUPTED
    except OSError as error:
        # Only the flush above gets here: everything that has a name was reported with it.
        from miles_ci.files import drop_output

        drop_output(sys.stdout)
        print(f"{PROGRAM}: standard output: {error.strerror or error}", file=sys.stderr)
        return ExitCode.INFRA


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return ExitCode.OK if arguments else ExitCode.CONFIG
    if arguments[0] in ("-V", "--version"):
        import miles_ci

        print(f"{PROGRAM} {miles_ci.__version__}")
        return ExitCode.OK
    name = arguments[0]
    if name not in COMMANDS:
        print(f"{PROGRAM}: error: unknown command '{name}'{suggestion(name, COMMANDS)}", file=sys.stderr)
        return ExitCode.CONFIG
    try:
        return _dispatch(name, arguments[1:])
    except CiError as error:
        print(f"{error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except OSError as error:
        # A full disk, a folder that cannot be written: the machine or the path, never a reason for a traceback.
        print(f"{PROGRAM} {name}: {error}", file=sys.stderr)
        return ExitCode.INFRA if error.errno in _MACHINE else ExitCode.CONFIG


def _dispatch(name: str, arguments: Sequence[str]) -> int:
    from miles_ci.environment import refuse_unknown

    refuse_unknown()
    module = importlib.import_module(COMMANDS[name][0])
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}",
        description=(module.__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    try:
        args = parser.parse_args(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0) if not isinstance(stop.code, str) else ExitCode.CONFIG
    return int(module.main(args))


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        f"usage: {PROGRAM} COMMAND [options]",
        "",
        "Hardware-aware test registry, planner and runner.",
        "",
        "commands:",
    ]
    lines += [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    lines += [
        "",
        f"`{PROGRAM} COMMAND --help` shows the options of one command.",
        "exit codes: 0 ok · 1 test failure · 2 usage, configuration, declaration · 3 infrastructure only · 4 zero tests",
        "            5 test never executed or plan mismatch · 6 metric bound · 7 generated file drift · 130 interrupted",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
