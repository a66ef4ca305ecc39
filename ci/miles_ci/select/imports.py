"""Names that a Python source may import, found without parsing it.

A deliberate over-approximation: text inside strings and comments counts too, since an edge too many only
runs a test too many. Found are import statements (relative ones resolved), `import_module("literal")`,
`python -m name` and, because dispatch tables hold them, every string literal that is a dotted name or a
path ending in `.py`. An import through a computed name is not seen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_IMPORT = re.compile(
    r"(?:^|[;:])[ \t]*"
    r"(?:from[ \t]*(\.*[ \t]*[\w.]*)[ \t]*import\b[ \t]*(\([^()]*\)|\*|[^\n;#]+)|import[ \t]+([^\n;#]+))",
    re.MULTILINE,
)
_DOTTED = re.compile(r"""["'](\.*[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)["']""")
_MODULE_CALL = re.compile(r"""(?:import_module|__import__|find_spec|run_module)\(\s*["'](\.*[\w.]+)["']""")
_DASH_M = re.compile(r"""-m["']?[ \t,]*\s*["']?([A-Za-z_][\w.]*)""")
_SCRIPT = re.compile(r"""["'/ ]([\w./-]+\.py)\b""")
_COMMENT = re.compile(r"#[^\n]*")


@dataclass(frozen=True, slots=True)
class FileImports:
    """Absolute dotted names, and paths of scripts, that one file mentions."""

    modules: tuple[str, ...]
    scripts: tuple[str, ...]


def package_of(path: str) -> str:
    """Dotted name of the package that a file belongs to: `a/b/c.py` and `a/b/__init__.py` -> `a.b`."""
    folder = path.rpartition("/")[0]
    return folder.replace("/", ".")


def find_imports(path: str, data: bytes) -> FileImports:
    """Everything the file may import. Bytes that are no UTF-8 are read as Latin-1, which keeps ASCII names."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    if "\\\n" in text or "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\\\n", " ")
    package = package_of(path)
    names: dict[str, None] = {}
    for match in _IMPORT.finditer(text):
        base, members, plain = match.groups()
        if plain is not None:
            for part in plain.split(","):
                word = part.split()
                if word:
                    names[word[0]] = None
            continue
        base = _absolute(base.replace(" ", "").replace("\t", ""), package)
        if base:
            names[base] = None
        if members.startswith("("):
            members = _COMMENT.sub("", members[1:-1])
        for part in members.split(","):
            word = part.split()
            if word and word[0] != "*":
                names[f"{base}.{word[0]}" if base else word[0]] = None
    for pattern in (_DOTTED, _MODULE_CALL):
        for name in pattern.findall(text):
            names[_absolute(name, package)] = None
    if "-m" in text:
        for name in _DASH_M.findall(text):
            names[name] = None
    scripts = tuple(dict.fromkeys(_SCRIPT.findall(text))) if ".py" in text else ()
    return FileImports(tuple(names), scripts)


def _absolute(name: str, package: str) -> str:
    """Resolve leading dots: one dot is the file's own package, each further one its parent."""
    stripped = name.lstrip(".")
    level = len(name) - len(stripped)
    if level == 0:
        return stripped
    parts = package.split(".") if package else []
    keep = len(parts) - (level - 1)
    if keep < 0:
        return stripped
    return ".".join([*parts[:keep], *([stripped] if stripped else [])])
