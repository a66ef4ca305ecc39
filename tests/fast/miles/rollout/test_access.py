"""The run's token: who lacks it gets nothing of an engine but its health, and nobody sees it."""

import os
from pathlib import Path

import httpx
import pytest

from miles.config import ConfigError
from miles.rollout import access
from miles.rollout.config import EngineConfig
from miles.rollout.engines.embedded import launch
from miles_ci.declare import register_cpu_ci

register_cpu_ci(20, "stage-a-cpu", nightly=True)

GET = ("/model_info", "/server_info", "/health_generate", "/flush_cache", "/parameter_table", "/weight_status",
       "/parameter_digests", "/nothing", "/health/", "//health", "/docs")  # fmt: skip
POST = ("/generate", "/pause_generation", "/continue_generation", "/abort_request", "/flush_cache",
        "/release_memory_occupation", "/resume_memory_occupation", "/begin_weight_update",
        "/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_disk",
        "/init_weights_update_group", "/destroy_weights_update_group", "/end_weight_update",
        "/abort_weight_update")  # fmt: skip


def test_every_route_but_health_wants_the_token(engine_process):
    token = engine_process.token
    near = [
        {}, {"authorization": token}, {"authorization": f"bearer {token}"}, {"authorization": f"Bearer {token[:-1]}"},
        {"authorization": f"Bearer {token}x"}, {"authorization": "Bearer"}, {"x-api-key": token},
    ]  # fmt: skip
    with httpx.Client(base_url=engine_process.url) as http:
        assert http.get("/health").status_code == 200
        for path in GET:
            assert http.get(path).status_code == 401, path
        for path in POST:
            reply = http.post(path, json={})
            assert (reply.status_code, reply.json()["error"]["type"]) == (401, "unauthorized"), path
        for sent in near:
            assert http.get("/server_info", headers=sent).status_code == 401, sent
        twice = [("authorization", f"Bearer {token}"), ("authorization", "Bearer other")]
        assert http.get("/server_info", headers=twice).status_code == 401
        assert http.get("/server_info", headers=access.headers(token)).status_code == 200


def test_all_routes_of_the_engine_are_in_these_lists(local_engine):
    from miles.rollout.engines.embedded.server import EngineServer

    engine = local_engine()
    routes = {(route.path, method) for route in EngineServer(engine.scheduler, engine.limits, {}).app().routes
              for method in route.methods - {"HEAD"}}  # fmt: skip
    assert routes - {(path, "GET") for path in GET} - {(path, "POST") for path in POST} == {("/health", "GET")}


def test_the_token_is_in_no_command_line_environment_log_or_text(tiny_model, tmp_path):
    with launch(EngineConfig(max_running=2, max_total_tokens=256), tiny_model, log_path=tmp_path / "log") as handle:
        reply = httpx.post(handle.url + "/generate", content=b"{", headers=access.headers(handle.token))
        assert reply.status_code == 422
        seen = [Path(f"/proc/{handle.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        seen += [(tmp_path / "log").read_bytes(), repr(handle).encode(), reply.content]
        assert all(handle.token.encode() not in text for text in seen)


def test_a_token_comes_out_of_a_pipe_once():
    token = access.new_token()
    fd = access.pipe_with(token)
    assert access.read_fd(fd) == token
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_a_token_file_must_be_its_owners_alone(tmp_path):
    token = access.new_token()
    path = tmp_path / "token"
    path.write_text(token + "\n")
    path.chmod(0o600)
    assert access.read_file(path) == token
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0600"):
        access.read_file(path)
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    for other in (tmp_path / "link", tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="cannot be read"):
            access.read_file(other)


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 31, "x" * 257, "x" * 40 + "\n", "ä" * 40, "x" * 20 + " " + "y" * 20]
)
def test_what_is_no_token_is_refused(token):
    with pytest.raises(ConfigError, match="32 to 256"):
        access.TokenRequired(None, token)
