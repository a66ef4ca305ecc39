"""Forty injection strings through every channel a stranger has; what a rerun resolves to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles_ci.bot import access
from miles_ci.bot.directives import Directives, parse_directives
from miles_ci.bot.gateway import Gateway
from miles_ci.bot.github import Client
from miles_ci.bot.runs import read_run
from miles_ci.bot.status_card import make_card, pull_of
from miles_ci.registry import load_fleet
from miles_ci.report.cards import lark, pr_comment, summary
from tests.fast.ci.bot.conftest import HEAD, ROOT, Job, comment_event
from tests.fast.ci.bot.helpers.github_server import APP_ID, BOT_ID, GitHub
from tests.fast.ci.bot.test_approval_security import request_env

STRINGS = [
    "$(id)", "`id`", "; id", "&& id", "|| id", "| id", "> /etc/passwd", "< /etc/passwd", "$IFS", "${PATH}", "${{ github.token }}", "${{ secrets.X }}", "{{ x }}", "%0A::set-output name=a::b",
    "\n::add-mask::x", "::stop-commands::x", "::error::x", "a\r\nb", "\x00", "\u202egnp.exe", "\u200b", "'", '"', "\\", "<script>alert(1)</script>", "<img src=x onerror=y>", "<at id=all></at>",
    "[x](javascript:y)", "![x](https://evil.example/x.png)", "@maintainers", "<!-- miles-ci {\"v\":1,\"kind\":\"rerun\"} -->", "-->", "```\n/cancel\n```", "--upload-pack=id", "-oProxyCommand=id", "../../etc/passwd", "refs/heads/main:x",
    "a\nGITHUB_TOKEN=x", "x" * 70_000, "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "https://evil.example/#x", "=cmd|' /C calc'!A0",
]  # fmt: skip


def test_there_are_at_least_forty() -> None:
    assert len(STRINGS) >= 40


@pytest.mark.parametrize("text", STRINGS)
def test_no_string_becomes_a_directive(text: str) -> None:
    found = parse_directives(f"ci-sglang-pr: {text}\n")
    assert not isinstance(found, Directives) or "sglang" not in found.targets or "\n" in text or "\r" in text


def test_no_string_in_a_comment_starts_anything(hub: GitHub, client: Client, app: Client) -> None:
    hub.user("maria", "admin")
    hub.pull(4, author="paul", sha=HEAD)
    shapes = ("/rerun-test tests/fast/{}/test_x.py", "/rerun-failed {}", "/ok-to-test {}", "/run-ci-{}")
    gateway = Gateway(
        client, app, load_fleet(ROOT / "registry.yaml"), ROOT, BOT_ID, APP_ID, "main", lambda directives: {}
    )
    for text in STRINGS:
        body = "\n".join(shape.replace("{}", text[:15_000]) for shape in shapes)
        gateway.handle(comment_event(hub, 4, body, "maria"))
    assert hub.dispatched == []
    assert hub.checks == {}
    assert hub.labels[4] == []
    for comment in hub.comments_of(4):
        if comment["user"]["id"] == BOT_ID:
            assert "<script" not in comment["body"]
            assert "@maintainers" not in comment["body"]


def test_no_string_in_a_title_branch_or_label_reaches_a_card_as_markup(hub: GitHub, client: Client) -> None:
    for text in STRINGS:
        title = text[:1000].replace("\x00", "")
        run = hub.run(
            "pr-test.yml", title=title, status="completed", conclusion="failure", head_sha=HEAD, event="pull_request"
        )
        run["head_branch"] = title
        hub.job(run["id"], f"job {title}"[:200], "failure")
        card = make_card(client, read_run(client, run["id"]), now=0.0)
        for rendered in (
            pr_comment.render(card),
            summary.render(card),
            json.loads(lark.request(card, 1, None))["card"]["body"]["elements"][1]["content"],
        ):
            for markup in ("<script", "<img", "<at", "](javascript", "![x]", "<!-- miles-ci", "\u202e"):
                assert markup not in rendered, (text, markup)
    hub.pull(4, author="paul", sha=HEAD)
    assert pull_of(client, read_run(client, run["id"])) == 4


def test_outputs_with_newlines_cannot_forge_other_outputs(tmp_path: Any) -> None:
    from miles_ci.bot.actions_io import write_outputs

    path = tmp_path / "out"
    write_outputs({"a": "x\nauthorised=true\n", "b": "fine"}, {"GITHUB_OUTPUT": str(path)})
    lines = path.read_text().splitlines()
    mark = lines[0].removeprefix("a<<")
    assert len(mark) > 30
    assert lines[1:] == ["x", "authorised=true", "", mark, "b=fine"]


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_ci.bot.oci.Registry.digest", lambda self, text: "sha256:" + "ab" * 32)


def test_a_file_registered_in_two_suites_runs_in_both_and_suite_narrows(
    hub: GitHub, job: Job, checkout: Any, images: None
) -> None:
    hub.pull(5, author="maria", sha=HEAD)
    hub.user("maria", "write")
    calls = "from miles_ci.declare import register_cpu_ci, register_cuda_ci\n\nregister_cpu_ci(est_time=5, suite='stage-b-cpu')\nregister_cuda_ci(est_time=60, suite='stage-b-1-gpu-h200', hardware=['h200'], labels=['kernels'])\n\n\ndef test_x():\n    assert True\n"
    (checkout / "tests/e2e").mkdir()
    (checkout / "tests/e2e/test_both.py").write_text(calls)
    env = request_env(
        TEST_FILE="tests/e2e/test_both.py", GITHUB_RUN_ID="1", DIRECTIVES=json.dumps({"ci-sglang-pr": "d" * 40})
    )
    code, outputs = job("resolve", "--root", ".", **env)
    assert code == 0
    assert json.loads(outputs["planned"]) == {"stage-b-cpu": "cpu", "stage-b-1-gpu-h200": "h200"}
    (leg,) = json.loads(outputs["matrix_cuda"])["include"]
    assert leg["image"].startswith("ghcr.io/miles-rl/miles@sha256:")
    assert leg["runs_on"] == ["self-hosted", "nvidia", "h200", "1gpu"]
    assert leg["timeout_minutes"] == 80
    assert json.loads(outputs["dependency_commits"]) == {"sglang": "d" * 40}
    code, outputs = job("resolve", "--root", ".", **(env | {"SUITE": "stage-b-cpu"}))
    assert (outputs["count_cpu"], outputs["count_cuda"]) == ("1", "0")
    assert job("resolve", "--root", ".", **(env | {"SUITE": "stage-a-cpu"}))[0] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("register_cpu_ci(est_time=x, suite='stage-b-cpu')", "est_time"),
        ("pass", "declares no suite"),
        ("register_cpu_ci(est_time=5, suite='none')", "not known"),
    ],
)
def test_a_faulty_declaration_is_the_answer_of_the_rerun(
    hub: GitHub, job: Job, checkout: Any, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    hub.pull(5, author="maria", sha=HEAD)
    (checkout / "tests/e2e").mkdir()
    (checkout / "tests/e2e/test_faulty.py").write_text(
        f"from miles_ci.declare import register_cpu_ci\n\n{text}\n\n\ndef test_x():\n    assert True\n"
    )
    assert job("resolve", "--root", ".", **request_env(TEST_FILE="tests/e2e/test_faulty.py", GITHUB_RUN_ID="1"))[0] == 2
    assert message in capsys.readouterr().err


def test_an_approved_fork_runs_on_gpus_with_the_approved_commits(
    hub: GitHub, job: Job, app: Client, images: None
) -> None:
    hub.user("maria", "write")
    hub.user("paul")
    hub.pull(5, author="paul", sha=HEAD, fork=True)
    access.store_approval(
        app, access.Approval(HEAD, hub.users["maria"], {"ci-megatron-pr": "e" * 40}, access.directives_hash(""))
    )
    job("gateway", event=comment_event(hub, 5, "/rerun-test tests/fast-gpu/test_kernel.py", "maria"))
    inputs = hub.dispatched[-1][1]
    assert json.loads(inputs["directives"]) == {"ci-megatron-pr": "e" * 40}
    env = request_env(TEST_FILE=inputs["test_file"], DIRECTIVES=inputs["directives"], GITHUB_RUN_ID="1")
    code, outputs = job("resolve", "--root", ".", **env)
    assert (code, outputs["count_cuda"]) == (0, "1")
    assert json.loads(outputs["dependency_commits"]) == {"megatron": "e" * 40}


def test_resolve_image_refuses_a_tag_that_does_not_exist(
    job: Job, monkeypatch: pytest.MonkeyPatch, images: None
) -> None:
    _, outputs = job("resolve-image", "--reference", "ghcr.io/miles-rl/miles:ci-0123456789abcdef")
    assert outputs["image"] == "ghcr.io/miles-rl/miles@sha256:" + "ab" * 32
    monkeypatch.setattr("miles_ci.bot.oci.Registry.digest", lambda self, text: None)
    assert job("resolve-image", "--reference", "ghcr.io/miles-rl/miles:gone")[0] == 2
