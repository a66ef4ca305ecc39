"""The page that shows the cards: same data, escaped, links kept."""

from __future__ import annotations

from miles_ci.report.analyse import Report
from miles_ci.report.analyst import Analysis
from miles_ci.report.cards import Card, JobRow
from miles_ci.report.cards.html import markdown_html, page


def card(reason: str) -> Card:
    row = JobRow(
        "stage (1/2)",
        "https://github.com/a/b/actions/runs/1/job/2",
        "failure",
        (Analysis("j", "tests/a.py::test_x", reason),),
    )
    return Card(
        "Nightly: failure",
        "nightly",
        "now",
        "https://github.com/a/b/actions/runs/1",
        "failure",
        Report({"failed": 1}, ()),
        (row,),
    )


def test_both_cards_show_test_reason_and_link() -> None:
    text = page(card("boom"))
    assert text.count("boom") == 2
    assert text.count('href="https://github.com/a/b/actions/runs/1/job/2"') == 2
    assert "<code>tests/a.py::test_x</code>" in text
    assert "boom" in page(card("boom"), which="pr")
    assert 'class="lark"' not in page(card("boom"), which="pr")


def test_what_the_cards_escaped_stays_text_on_the_page() -> None:
    text = page(card("<script>alert(1)</script> [x](https://evil.example/) **b** `c` <at id=all></at>"))
    assert "<script>" not in text
    assert 'href="https://evil' not in text
    assert "<at " not in text
    assert "alert(1)" in text


def test_the_markdown_of_cards_becomes_html() -> None:
    assert (
        markdown_html("### A\n\n- **b** `c|d`\n- e\n\nf\\_g &lt;")
        == "<h3>A</h3>\n<ul><li><b>b</b> <code>c|d</code></li>\n<li>e</li>\n</ul>\n<p>f_g &lt;</p>"
    )
