"""`miles serve`: an engine and a router over it, as processes; what each says and how each ends."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from typer.testing import CliRunner

from miles.cli import app
from miles.config import ConfigError

START_S = 100


@pytest.fixture
def serve():
    """Start `miles serve ARGUMENTS`; gives (process, what it printed)."""
    started = []

    def start(*arguments: str):
        process = subprocess.Popen(
            [sys.executable, "-m", "miles.cli", "serve", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        assert select.select([process.stdout], [], [], START_S)[0], "it said nothing"
        return process, json.loads(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("t" * 40)
    return path


def ask(url: str, token: str = "t" * 40) -> dict:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read())


def test_a_router_answers_for_the_engine_behind_it_and_both_end_on_an_interrupt(serve, token_file, tiny_model):
    token = ["--token-file", str(token_file)]
    options = ["--set", "max_running=8", "--set", "max_total_tokens=1024", *token]
    engine, said = serve("engine", str(tiny_model), "--weight-version", "7", *options)
    router, front = serve("router", said["url"], *token)
    assert ask(front["url"] + "/model_info")["weight_version"] == "7"
    assert said["pid"] != engine.pid
    for url in (said["url"], front["url"]):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(url + "/model_info", token="u" * 40)
    for process in (router, engine):
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130, process.stderr.read()
    with pytest.raises(urllib.error.URLError):
        ask(said["url"] + "/model_info")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("engine", "m", "--set", "potr=1"), "--set potr=1: .*potr"),
        (("engine", "m", "--set", "port=x"), "--set port=x: .*port"),
        (("engine", "m"), "--token-file: the embedded engine answers only who has its token"),
        (("engine", "m", "--set", "engine=sglang", "--token-file", "f"), "--token-file: .* asks for no token"),
        (("router", "http://127.0.0.1:1", "--set", "policy=fair"), "--set policy=fair: .*least_inflight"),
    ],
)
def test_a_wrong_option_is_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["serve", *arguments], catch_exceptions=False)
