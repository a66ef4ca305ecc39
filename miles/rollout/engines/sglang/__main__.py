"""Supervisor of one SGLang server; speaks the start protocol of `miles.rollout.engines.process`.

The server stays in the supervisor's process group, so that killing the group ends both; when the supervisor's parent
is gone, it kills the group itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from miles.config import MilesError
from miles.rollout.config import EngineConfig
from miles.rollout.engines.sglang.arguments import PORTS, server_arguments, server_environment, server_python
from miles.rollout.engines.sglang.interpreter import check_interpreter
from miles.rollout.engines.start_report import end_group_with_parent, say
from miles.rollout.errors import EngineModelError, EngineStartError
from miles.rollout.ports import PortTaken, start_on_leased_ports

POLL_S = 0.2
HEALTH_TIMEOUT_S = 5.0
OUTPUT_WAIT_S = 2.0
LOG_TAIL = 4000


def main() -> int:
    parser = argparse.ArgumentParser(prog="miles.rollout.engines.sglang")
    parser.add_argument("--config-json", required=True)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--weight-version", type=int, default=0)
    parser.add_argument("--ready-fd", type=int, default=-1)
    parser.add_argument("--parent-pid", type=int, default=0)
    args = parser.parse_args()
    end_group_with_parent(args.parent_pid)
    report: Any = os.fdopen(args.ready_fd, "w") if args.ready_fd >= 0 else sys.stdout
    try:
        config = EngineConfig.model_validate_json(args.config_json)
        server, url = start_server(config, args.model, args.weight_version)
    except MilesError as error:
        say(report, {"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    say(report, {"url": url, "pid": os.getpid()})
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(os.getpgid(0), signal.SIGKILL))
    return server.wait()


def start_server(config: EngineConfig, model_dir: Path, weight_version: int) -> tuple[subprocess.Popen[bytes], str]:
    """A healthy server and its address. `EngineStartError` carries the end of the server's output."""
    check_interpreter(config)
    if not (model_dir / "config.json").is_file():
        raise EngineModelError(f"model folder {model_dir}: config.json is missing; name a Hugging Face model folder")
    deadline = time.monotonic() + config.start_timeout_s

    def attempt(ports: list[int]) -> tuple[subprocess.Popen[bytes], str]:
        if config.port:
            ports[0] = config.port
        arguments = server_arguments(config, model_dir, ports, weight_version=weight_version)
        command = [server_python(config), "-m", "sglang.launch_server", *arguments]
        environment = server_environment(config)
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        host = f"[{config.host}]" if ":" in config.host else config.host
        url = f"http://{host}:{ports[0]}"
        _wait_healthy(server, url, deadline, ServerOutput(server))
        return server, url

    return start_on_leased_ports(PORTS, attempt, host=config.host)


class ServerOutput:
    """Passes the server's output on to our stderr and remembers its end."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self._tail = b""
        self._thread = threading.Thread(target=self._pump, args=(server.stdout,), daemon=True)
        self._thread.start()

    def _pump(self, stream: Any) -> None:
        while piece := stream.read1(65536):
            sys.stderr.buffer.write(piece)
            sys.stderr.buffer.flush()
            self._tail = (self._tail + piece)[-LOG_TAIL:]

    def tail(self) -> str:
        """The end of what a server that has exited wrote."""
        self._thread.join(OUTPUT_WAIT_S)
        return self._tail.decode(errors="replace")


def _wait_healthy(server: subprocess.Popen[bytes], url: str, deadline: float, output: ServerOutput) -> None:
    while time.monotonic() < deadline:
        if server.poll() is not None:
            tail = output.tail()
            if "address already in use" in tail.lower():
                raise PortTaken
            raise EngineStartError(f"the sglang server ended with code {server.returncode} at start:\n{tail}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            with urllib.request.urlopen(url + "/health", timeout=HEALTH_TIMEOUT_S) as reply:
                if reply.status == 200:
                    return
        time.sleep(POLL_S)
    server.kill()
    raise EngineStartError(f"the sglang server was not healthy in time (engine.start_timeout_s):\n{output.tail()}")


if __name__ == "__main__":
    sys.exit(main())
