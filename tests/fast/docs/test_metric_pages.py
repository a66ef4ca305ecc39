"""The page of metrics is what their list makes, and pages name metrics that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT, Page, all_pages, read_page

from checks import metrics_page
from miles.config import metric_table
from miles.config.metric_names import METRICS

PAGES = {path.relative_to(ROOT).as_posix(): path for path in all_pages()}
KNOWN = METRICS | {metric.name for metric in (*metric_table.PATTERNS, *metric_table.EVALUATION)}
GROUPS = {name.partition("/")[0] for name in KNOWN}
# As the title of a group of metrics, `rollout/*`; `<part>` and `<reason>` are the user's.
METRIC = re.compile(rf"({'|'.join(sorted(GROUPS))})/[a-z0-9_/<>]+")


def unknown_metrics(page: Page) -> Iterator[str]:
    for line, span in page.spans():
        users = span.startswith((metric_table.REFUSED, metric_table.REWARD_PARTS))
        if METRIC.fullmatch(span) and span not in KNOWN and not users and not (ROOT / span).exists():
            yield f"{page.place(line)}: {span} is no metric"


@pytest.mark.parametrize("name", PAGES)
def test_metrics_that_a_page_names_exist(name: str) -> None:
    assert list(unknown_metrics(read_page(PAGES[name]))) == []


def test_a_metric_that_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`train/entropy`, `train/entropie`, `rollout/refused/zero_std`, `eval/<set>/pass_at_<k>`\n")
    assert [fault.rpartition(": ")[2] for fault in unknown_metrics(read_page(page))] == ["train/entropie is no metric"]


def test_page_is_what_the_list_makes_and_has_every_metric_once() -> None:
    assert metrics_page.main(["--check"]) == 0, "run `make generate`"
    text = metrics_page.PAGE.read_text()
    listed = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(KNOWN | {"step", "weight_version"})


def test_a_page_that_is_behind_is_told_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_page, "PAGE", tmp_path / "metrics.md")
    assert metrics_page.main(["--check"]) == 1
    assert metrics_page.main([]) == 0
    assert metrics_page.main(["--check"]) == 0
    metrics_page.PAGE.write_text(metrics_page.PAGE.read_text().replace("`train/loss`", "`train/los`"))
    assert metrics_page.main(["--check"]) == 1
    assert "run `make generate`" in capsys.readouterr().err
    assert metrics_page.main(["--chek"]) == 2
