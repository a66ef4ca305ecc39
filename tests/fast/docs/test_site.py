"""The documentation site builds without a network and without a warning, and its pages load nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from pages import ROOT

SITE = ROOT / "docs" / "site"
# What a browser fetches by itself; a link that a reader follows may lead anywhere.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\ssrc=[\"']?(?:https?:)?//[^\"'>]*"
    r"|<link\b(?=[^>]*rel=[\"']?(?:stylesheet|icon|preconnect|preload))[^>]*href=[\"']?(?:https?:)?//[^\"'>]*"
    r"|url\([\"']?https?://[^)]*"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; no proxy leads anywhere, so that a fetch while building would fail."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(SITE / "mkdocs.yml")]
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, "--site-dir", str(folder)], env=os.environ | nowhere, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", SITE / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(120)
def test_every_page_is_there_and_fetches_nothing(built: Path) -> None:
    wanted = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    wanted = {name.replace("README.html", "index.html") for name in wanted if not name.startswith("site/")}
    pages = {path.relative_to(built).as_posix(): path.read_text() for path in built.rglob("*.html")}
    assert wanted - pages.keys() == set()
    assert FETCHED.search('<script src="https://x/y.js">')
    fetched = {name: FETCHED.findall(text) for name, text in pages.items() if FETCHED.search(text)}
    assert fetched == {}


@pytest.mark.timeout(120)
def test_the_api_page_holds_docstrings_and_the_decisions_page_its_list(built: Path) -> None:
    api = (built / "reference" / "api.html").read_text()
    for name in ("miles.data.sample.Sample", "miles.recipe.loader.load", "miles_ci.declare.register_cuda_ci"):
        assert f'id="{name}"' in api
    decisions = (built / "decisions" / "index.html").read_text()
    for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"):
        assert f'href="{path.stem}.html"' in decisions


def page_at(name: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=name))


def test_links_out_of_the_documents_become_names_and_must_exist(hooks: ModuleType) -> None:
    page = page_at("guide/x.md")
    assert hooks.on_page_markdown("[log](../../CHANGELOG.md#a)", page=page) == "log (`CHANGELOG.md`)"
    assert hooks.on_page_markdown("[d](../decisions)", page=page) == "[d](../decisions/README.md)"
    assert hooks.on_page_markdown("[r](recipes.md#b)", page=page) == "[r](recipes.md#b)"
    assert hooks.on_page_markdown("[w](https://example.org/a)", page=page) == "[w](https://example.org/a)"
    with pytest.raises(ValueError, match="leads nowhere"):
        hooks.on_page_markdown("[log](../../CHANGELOG.txt)", page=page)
