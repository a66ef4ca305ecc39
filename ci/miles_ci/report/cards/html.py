"""A page that shows the two cards as a reader will see them, drawn from the same data; for the guide and for review.

A small Markdown reader for exactly what our cards use (headings, bold, code, links, lists); text is escaped first.
"""

from __future__ import annotations

import html
import re

from miles_ci.report.cards import lark, pr_comment
from miles_ci.report.cards.model import Card

_STYLE = """
body { margin: 0; padding: 24px; background: #f6f8fa; font: 14px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1f2328; }
.pr, .lark { width: 760px; background: #fff; border: 1px solid #d1d9e0; border-radius: 8px; overflow: hidden; }
.pr .top { background: #f6f8fa; padding: 8px 16px; border-bottom: 1px solid #d1d9e0; color: #59636e; }
.body { padding: 12px 16px; } h3 { margin: 4px 0 8px; } ul { margin: 4px 0 12px; padding-left: 22px; } p { margin: 6px 0; }
code { background: #eff1f3; border-radius: 4px; padding: 1px 5px; font: 12px "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
a { color: #0969da; text-decoration: none; }
.lark .head { color: #fff; padding: 10px 16px; font-weight: 600; } .red { background: #d83931; } .green { background: #2ea121; }
.grey { background: #8f959e; } .orange { background: #de7802; } .lark hr { border: 0; border-top: 1px solid #e5e6eb; }
"""


def _inline(text: str) -> str:
    """One line of card Markdown to HTML; what the cards escaped stays text."""
    held: list[str] = []

    def hold(markup: str) -> str:
        held.append(markup)
        return f"\x00{len(held) - 1}\x00"

    text = re.sub(r"(`+)(.+?)\1", lambda m: hold(f"<code>{html.escape(m[2].strip())}</code>"), text)
    text = re.sub(r"\\([\\`*_{}\[\]()#+!|~$:@-])", lambda m: hold(html.escape(m[1])), text)
    text = re.sub(r"&(#\d+|lt|gt|amp);", lambda m: hold(m[0]), text)
    text = html.escape(text, quote=False)
    text = re.sub(r"\[([^\]]*)\]\((https?://[^)\s]+)\)", lambda m: f'<a href="{html.escape(m[2])}">{m[1]}</a>', text)
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    while "\x00" in text:
        text = re.sub("\x00(\\d+)\x00", lambda m: held[int(m[1])], text)
    return text


def markdown_html(text: str) -> str:
    """Card Markdown to HTML."""
    out: list[str] = []
    in_list = False
    for line in text.split("\n"):
        if line.startswith("<!--"):
            continue
        if line.startswith("- "):
            out.append(("" if in_list else "<ul>") + f"<li>{_inline(line[2:])}</li>")
            in_list = True
            continue
        if in_list:
            out.append("</ul>")
            in_list = False
        if line.startswith("### "):
            out.append(f"<h3>{_inline(line[4:])}</h3>")
        elif line.strip():
            out.append(f"<p>{_inline(line)}</p>")
    return "\n".join(out + (["</ul>"] if in_list else []))


def pr_card(card: Card) -> str:
    return f'<div class="pr"><div class="top"><b>github-actions</b> bot commented</div><div class="body">{markdown_html(pr_comment.render(card))}</div></div>'


def lark_card(card: Card) -> str:
    built = lark.build(card)
    blocks = [markdown_html(element["content"]) for element in built["body"]["elements"]]
    head = f'<div class="head {built["header"]["template"]}">{html.escape(built["header"]["title"]["content"])}</div>'
    return f'<div class="lark">{head}<div class="body">{"<hr>".join(blocks)}</div></div>'


def page(card: Card, *, which: str = "both") -> str:
    """The whole page; `which` is pr, lark or both."""
    parts = {"pr": [pr_card(card)], "lark": [lark_card(card)], "both": [pr_card(card), lark_card(card)]}[which]
    return f"<!doctype html><html><head><meta charset=utf-8><title>{html.escape(card.title)}</title><style>{_STYLE}</style></head><body>{'<br>'.join(parts)}</body></html>\n"
