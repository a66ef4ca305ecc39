"""What the site builder needs to know of this repository: files outside `docs/`, and the list of decisions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links that leave `docs/` become the file's name (the site stands alone); the decisions' page gets its list."""
    here = (DOCS / page.file.src_uri).parent
    markdown = re.sub(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)", lambda found: _link(found, here), markdown)
    if page.file.src_uri == "decisions/README.md":
        markdown += "\n" + decisions()
    return markdown


def _link(found: re.Match[str], here: Path) -> str:
    """Raises ValueError for a link to a file that does not exist outside `docs/`; the builder checks those inside."""
    label, target = found[1], found[2]
    if target.startswith("/"):
        return found[0]
    path = (here / target).resolve()
    if path.is_relative_to(DOCS):
        is_folder = path.is_dir() and (path / "README.md").exists()
        return f"[{label}]({target.rstrip('/')}/README.md)" if is_folder else found[0]
    if not path.exists():
        raise ValueError(f"{here}: the link to {target} leads nowhere")
    return f"{label} (`{path.relative_to(DOCS.parent).as_posix()}`)"


def decisions() -> str:
    """One line for each decision: number, title, link."""
    lines = []
    for path in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"
