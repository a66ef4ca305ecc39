"""Status cards: one `Card` of data, three forms (Lark, pull-request comment, job summary) and an HTML rendering.

The Lark card leaves out what does not fit into 20 KB, totals and the run link never.
"""

from miles_ci.report.cards.model import Card, JobRow, group_rows

__all__ = ["Card", "JobRow", "group_rows", "html", "lark", "model", "pr_comment", "summary"]
