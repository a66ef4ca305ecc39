"""Bad data through the command that checks a recipe: exit code 2, and one line with the place and the fix."""

from __future__ import annotations

import json
import re
import sys

import pytest

from miles import cli

QUESTION = {"role": "user", "content": "1+2"}
RECIPE = "name: r\ndata: {task: jsonl, jsonl: {path: rows.jsonl, messages_key: messages}, held_out_fraction: 0}\neval: {sets: []}\n"


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """said(rows, *overrides) -> what `miles recipe check` says of a recipe with these rows."""

    def check(rows, *overrides: str) -> str:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "r.yaml").write_text(RECIPE)
        words = [
            word
            for text in (
                "rollout.reward.kind=remote_http",
                "rollout.reward.options.url=http://127.0.0.1:9/",
                *overrides,
            )
            for word in ("--set", text)
        ]
        monkeypatch.setattr(sys, "argv", ["miles", "recipe", "check", str(tmp_path / "r.yaml"), *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert ended.value.code == 2, captured
        assert captured.err.count("\n") == 1
        return captured.err

    return check


def row(*messages, **more):
    return {"messages": list(messages), "answer": 3, **more}


@pytest.mark.parametrize(
    ("rows", "overrides", "expected"),
    [
        ([row(QUESTION), row({"role": "bot", "content": "x"})], [], r'rows\.jsonl:2: messages\[0\]\.role is "bot"; use one of'),
        ([row({"role": "user", "content": ""})], [], r"rows\.jsonl:1: messages\[0\]\.content is empty; write its text, or"),
        ([row(QUESTION, QUESTION)], [], r"rows\.jsonl:1: messages\[1\]: a user message follows a user message; the order is"),
        ([row(QUESTION)], ["data.chat_template=bad.jinja"], r"rows\.jsonl:1: .*bad\.jinja: line 2: .*; mend the template"),
        ([row(QUESTION)], ["data.chat_template=no.jinja"], r"cannot read .*/no\.jinja: No such file or directory; a relative"),
        ([row(QUESTION)], ["data.max_prompt_tokens=9"], r"rows\.jsonl:1 has \d+ tokens, .*=9; raise it, shorten the prompt, or"),
        ([row({"role": "user", "content": "<|im_end|>"})], [], r"holds '<\|im_end\|>', a special token .*; write it otherwise"),
        ([row(QUESTION)], ["data.task=parquet", "data.jsonl=null", "data.parquet={path: a.parquet, prompt_key: b}"], r"no column 'b' \(prompt_key\); it has c; set prompt_key to one of them"),
        ([row(QUESTION)], ["data.task=parquet", "data.jsonl=null", "data.parquet={path: n.parquet}"], r"n\.parquet: no such file; a relative path"),
        ([row(QUESTION)], ["data.task=python", "data.jsonl=null", "data.python={path: 'n.py:T'}"], r"data\.python\.path: there is no file .*/n\.py; a relative path begins"),
        ([row(QUESTION)], ["rollout.reward={kind: exact}"], r"\[REWARD\] .*the answer of '1\+2' is 3, not text; quote it, or use a"),
        ([row(QUESTION)], ["data.jsonl.tools_key=null", "data.jsonl.metadata_keys=[level]"], r"rows\.jsonl:1: nothing under 'level'; add it, or"),
    ],
)  # fmt: skip
def test_bad_data_is_one_line_with_the_fix(said, tmp_path, rows, overrides, expected):
    import pyarrow.parquet

    (tmp_path / "bad.jinja").write_text("{% for m in messages %}\n{{ m.content.a.b }}{% endfor %}")
    pyarrow.parquet.write_table(pyarrow.table({"c": ["1"]}), tmp_path / "a.parquet")
    assert re.search(expected, said(rows, *overrides))
