"""Dependency directives: form, values, what is not read, precedence."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_ci.bot.directives import Directives, Errors, Target, parse_directives, precedence


def ok(body: str | None) -> Directives:
    found = parse_directives(body)
    assert isinstance(found, Directives), found
    return found


def bad(body: str) -> tuple[str, ...]:
    found = parse_directives(body)
    assert isinstance(found, Errors), found
    return found.messages


def test_each_kind_of_value() -> None:
    found = ok("Text\n\nci-sglang-pr: #1234\nci-megatron-pr: \t" + "0a" * 20 + "  \nci-image-tag: v1.2_x-3\n")
    assert found.targets["sglang"] == Target("pull", "#1234")
    assert found.targets["sglang"].ref == "refs/pull/1234/head"
    assert found.targets["megatron"] == Target("sha", "0a" * 20)
    assert found.image_tag == "v1.2_x-3"
    assert ok("ci-sglang-pr: feature/x_1.2").targets["sglang"] == Target("ref", "feature/x_1.2")


@pytest.mark.parametrize(
    "body", [None, "", "ci-sglang-pr", "see ci-sglang-pr: #1", " ci-sglang-pr: #1", "CI-SGLANG-PR: #1", "ci-other: x"]
)
def test_nothing_is_read_from_other_text(body: str | None) -> None:
    assert ok(body) == Directives()


@pytest.mark.parametrize(
    "body",
    [
        "```\nci-sglang-pr: #1\n```", "````md\n```\nci-sglang-pr: #1\n```\n````", "~~~\nci-sglang-pr: #1\n~~~", "```\nci-sglang-pr: #1",
        "```py\n```x\nci-sglang-pr: #1\n```", "    ci-sglang-pr: #1", "\tci-sglang-pr: #1", "> ci-sglang-pr: #1", "> quote\nci-sglang-pr: #1",
        "<!--\nci-sglang-pr: #1\n-->", "<!-- a --> <!-- b\nci-sglang-pr: #1\n-->", "<!--\nci-sglang-pr: #1", "- item\n  ci-sglang-pr: #1",
    ],
)  # fmt: skip
def test_code_quotes_and_comments_are_inert(body: str) -> None:
    assert ok(body) == Directives()


def test_the_fence_example_of_the_template_is_inert_and_the_line_after_it_counts() -> None:
    body = "To test with a SGLang PR:\r\n```\r\nci-sglang-pr: #111\r\n```\r\nci-sglang-pr: #222\r\n"
    assert ok(body).targets["sglang"] == Target("pull", "#222")
    assert ok("`<!--` is shown\nci-sglang-pr: #5").targets["sglang"] == Target("pull", "#5")
    assert ok("```\n~~~\n```\nci-sglang-pr: #5").targets["sglang"] == Target("pull", "#5")


@pytest.mark.parametrize(
    "line",
    [
        "ci-sglang-pr: #0", "ci-sglang-pr: #12345678", "ci-sglang-pr: #1 please", "ci-sglang-pr:#1", "ci-sglang-pr:", "ci-sglang-pr: -x",
        "ci-sglang-pr: a..b", "ci-sglang-pr: a//b", "ci-sglang-pr: a@{1}", "ci-sglang-pr: a/", "ci-sglang-pr: a.lock", "ci-sglang-pr: $(id)",
        "ci-sglang-pr: a;b", "ci-sglang-pr: --upload-pack=x", "ci-sglang-pr: ext::sh", "ci-sglang-pr: é", "ci-image-tag: .x", "ci-image-tag: a/b",
        "ci-image-tag: " + "x" * 129, "ci-sglang-pr: " + "x" * 201, "ci-sglang-prs: #1", "ci-megatron-pr: #1 <!-- x -->",
    ],
)  # fmt: skip
def test_a_malformed_directive_is_an_error_with_its_line(line: str) -> None:
    assert bad(f"hello\n\n{line}\n")[0].startswith("line 3: ")


def test_equal_repetitions_are_fine_and_different_ones_are_not() -> None:
    assert ok("ci-sglang-pr: #1\nci-sglang-pr: #1").targets["sglang"] == Target("pull", "#1")
    assert "given twice" in bad("ci-sglang-pr: #1\nci-sglang-pr: #2")[0]


def test_all_errors_are_reported_at_once() -> None:
    assert len(bad("ci-sglang-pr: #0\nci-megatron-pr: a..b\nci-image-tag: /\n")) == 3


def test_precedence_is_dispatch_then_description_then_release() -> None:
    body = ok("ci-sglang-pr: #2\nci-megatron-pr: dev")
    chosen = precedence(
        dispatch={"ci-sglang-pr": "#1"}, body=body, release={"ci-megatron-pr": "core", "ci-image-tag": "r1"}
    )
    assert chosen == {
        "ci-sglang-pr": ("#1", "dispatch"),
        "ci-megatron-pr": ("dev", "description"),
        "ci-image-tag": ("r1", "release lock"),
    }


def test_the_longest_body_is_read_quickly() -> None:
    for filler in ("`" * 65_000, "<!--" * 16_000, ">" * 65_000, "`a" * 32_000, "\n" * 65_000):
        start = time.process_time()
        parse_directives(filler + "\nci-sglang-pr: #1")
        assert time.process_time() - start < 2.0


PIECES = [
    "ci-sglang-pr: #7",
    "```",
    "~~~",
    "````",
    "> q",
    "<!--",
    "-->",
    "",
    "text",
    "    code",
    "ci-image-tag: t",
    "`x`",
    "- a",
    "\r",
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=12), max_size=14))
def test_any_body_is_read_without_an_exception_and_only_valid_values_come_out(lines: list[str]) -> None:
    found = parse_directives("\n".join(lines))
    if isinstance(found, Directives):
        assert found.targets.get("sglang") in (None, Target("pull", "#7"))
        assert found.image_tag in (None, "t")


@settings(max_examples=200)
@given(st.text(max_size=40))
def test_a_value_of_a_stranger_never_gets_through_unless_it_fits_the_closed_form(value: str) -> None:
    found = parse_directives(f"ci-sglang-pr: {value}")
    if isinstance(found, Directives) and "sglang" in found.targets:
        assert all(char.isascii() and (char.isalnum() or char in "_./-#") for char in found.targets["sglang"].text)
        assert not found.targets["sglang"].text.startswith("-")
