"""Does the lock install from wheels alone, everywhere we say? `python -m checks.lock` (a minute; asks the package index).

For every supported Python and processor, what `make quickstart` installs and all extras are resolved under
constraints.txt without looking at this machine. Whatever is resolved must be pinned. Three packages that reasoning-gym
needs are published as source only; nothing that `make quickstart` installs is. And what we say of machines on
which nothing can be trained is held to: without megatron-core, the same list resolves there.

Exit code 1: a pair does not resolve, a package is not pinned, or megatron-core has become installable elsewhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_ci.workflows.requirements import requirements

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
PROJECTS = [ROOT / "pyproject.toml", ROOT / "ci/pyproject.toml"]
PYTHONS = ("3.11", "3.12", "3.13")
LINUX = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
MAC = "aarch64-apple-darwin"
# Their wheels ask for it, and the resolver assumes an older system.
MAC_RELEASE = "14.0"
ABSENT = "megatron-core"
ELSEWHERE = (("3.14", LINUX[0]), ("3.14", LINUX[1]), ("3.13", MAC), ("3.11", MAC))
SOURCE_ONLY = ("cellpylib", "pycosat", "zss")
LIMIT_S = 300


@dataclass(frozen=True)
class Answer:
    """`pins`: normalised name -> version. `error` is the resolver's, empty where it found an answer."""

    pins: dict[str, str]
    error: str


Resolver = Callable[[Sequence[str], str, str, Sequence[str]], Answer]


def resolve(wanted: Sequence[str], python: str, platform: str, from_source: Sequence[str]) -> Answer:
    """What an installer would choose for that machine, from wheels except for the packages named."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
    command += ["--constraints", str(CONSTRAINTS), "--python-version", python, "--python-platform", platform]
    command += ["--only-binary", ":all:", *(word for name in from_source for word in ("--no-binary", name))]
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": MAC_RELEASE}
    done = subprocess.run(
        command, input="\n".join(wanted), capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
    )
    return Answer(
        read_pins(done.stdout) if done.returncode == 0 else {}, done.stderr.strip() if done.returncode else ""
    )


def read_pins(text: str) -> dict[str, str]:
    """name==version lines; options, comments and markers are passed over."""
    found = {}
    for line in text.splitlines():
        name, equal, version = line.partition(";")[0].strip().partition("==")
        if equal and not name.startswith(("#", "-")):
            found[re.sub(r"[-_.]+", "-", name).lower()] = version.strip()
    return found


def faults(resolver: Resolver, say: Callable[[str], None]) -> Iterator[str]:
    """One line each; `say` is told what was looked at."""
    pinned = read_pins(CONSTRAINTS.read_text(encoding="utf-8"))
    base, everything = requirements(PROJECTS, []), requirements(PROJECTS, extras())
    for python in PYTHONS:
        for platform in LINUX:
            for what, wanted, from_source in (("quickstart", base, ()), ("every extra", everything, SOURCE_ONLY)):
                where = f"Python {python}, {platform}, {what}"
                answer = resolver(wanted, python, platform, from_source)
                if answer.error:
                    yield f"{where}: {answer.error}"
                    continue
                say(f"{where}: {len(answer.pins)} packages")
                for name in sorted(answer.pins.keys() - pinned.keys()):
                    yield f"{where}: {name}=={answer.pins[name]} is not in {CONSTRAINTS.name}"
    for python, platform in ELSEWHERE:
        where = f"Python {python}, {platform}"
        rest = [line for line in base if not line.startswith(ABSENT)]
        answer = resolver(rest, python, platform, ())
        if answer.error:
            yield f"{where}: more than {ABSENT} is missing: {answer.error}"
        elif not resolver([pin(ABSENT, pinned)], python, platform, ()).error:
            yield f"{where}: {ABSENT} has a wheel now; accept this machine, or correct what we say of it"
        else:
            say(f"{where}: all but {ABSENT}")


def extras() -> list[str]:
    """Every extra of both projects."""
    projects = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in PROJECTS]
    return sorted({name for project in projects for name in project["optional-dependencies"]})


def pin(name: str, pinned: dict[str, str]) -> str:
    return f"{name}=={pinned[name]}"


def main(resolver: Resolver = resolve) -> int:
    found = 0
    for fault in faults(resolver, print):
        found += 1
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
