"""What counts as an engine's answer: status 200, an object, success true; everything else is an error with its reason."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import orjson
import pytest

from miles.sync.engine_link import EngineLink
from miles.sync.errors import EngineSyncError

REPLIES: dict[str, tuple[int, bytes]] = {
    "/good": (200, b'{"success": true, "version": 3}'),
    "/refused": (200, b'{"success": false, "code": "busy", "message": "later", "retry_after_s": 2.5}'),
    "/silent": (200, b'{"version": 3}'),
    "/word": (200, b'{"success": "true"}'),
    "/missing": (404, b'{"success": true}'),
    "/list": (200, b"[1]"),
    "/text": (502, b"bad gateway"),
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))  # type: ignore[attr-defined]
        self.do_GET()

    def do_GET(self) -> None:
        status, body = REPLIES[self.path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    found = HTTPServer(("127.0.0.1", 0), Handler)
    found.bodies = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def link(server: HTTPServer) -> Iterator[EngineLink]:
    found = EngineLink(f"http://127.0.0.1:{server.server_port}/")
    yield found
    found.close()


def test_a_good_answer_is_its_object_and_a_body_travels_as_json(link: EngineLink, server: HTTPServer) -> None:
    assert link.get("/good", timeout_s=5) == {"success": True, "version": 3}
    assert link.post("/good", {"a": [1]}, timeout_s=5)["version"] == 3
    assert [orjson.loads(body) for body in server.bodies] == [{"a": [1]}]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("/refused", "busy", "later"),
        ("/silent", "http_200", "version"),
        ("/word", "http_200", "success"),
        ("/missing", "http_404", "success"),
        ("/list", "http_200", r"GET /list: b'\[1\]'"),
        ("/text", "http_502", "GET /text: b'bad gateway'"),
    ],
)
def test_every_other_answer_is_an_error_with_its_reason(link: EngineLink, path: str, code: str, message: str) -> None:
    with pytest.raises(EngineSyncError, match=message) as caught:
        link.get(path, timeout_s=5)
    assert caught.value.code == code
    assert caught.value.retry_after_s == (2.5 if path == "/refused" else None)
    assert link.get("/good", timeout_s=5)["version"] == 3, "the connection goes on"


def test_nobody_there_is_unreachable(server: HTTPServer) -> None:
    link = EngineLink("http://127.0.0.1:9")
    with pytest.raises(EngineSyncError, match="GET /good within 1 s: ConnectionRefusedError") as caught:
        link.get("/good", timeout_s=1)
    assert caught.value.code == "unreachable"


@pytest.mark.parametrize("url", ["127.0.0.1:80", "https://engine", "http://", "ftp://engine"])
def test_an_address_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(EngineSyncError, match="an engine URL looks like http://host:port"):
        EngineLink(url)
