"""Weight sync between two processes of one host: our transports, per-tensor sends as the alternative, and the limits.

    python benchmarks/weight_sync.py [--mib 1024] [--repeats 3] [--out benchmarks/results/weight_sync.json]

A mixed model (bf16 matrices, fp32 norms) is pushed into an engine process over real HTTP routes. Limits measured in
the same run: one memcpy of the same bytes, and a raw TCP loopback stream. Also: the checksum's share, and size and time
of a delta when 1, 10 and 100 % of the elements changed. Prints a table, writes JSON with date, hardware and command.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import cpu_record
import torch

from miles.sync.config import SyncConfig
from miles.sync.engine_link import EngineLink
from miles.sync.session import WeightPusher
from miles.weight_wire.bucket import SCHEMA, BucketHeader, Piece, as_bytes, digest, dtype_name
from miles.weight_wire.shared_buffer import SharedBuffer

REPOSITORY = Path(__file__).resolve().parent.parent
HIDDEN, FFN, VOCAB = 1024, 4096, 32000


def shapes_of(mib: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, shapes and dtypes of a model of about `mib` MiB."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    bf16, fp32, layer, size = torch.bfloat16, torch.float32, 0, 0
    if mib >= 256:
        shapes["model.embed_tokens.weight"] = ((VOCAB, HIDDEN), bf16)
        size = VOCAB * HIDDEN * 2
    while size < mib << 20:
        prefix = f"model.layers.{layer}."
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"):
            shapes[f"{prefix}{name}.weight"] = ((HIDDEN, HIDDEN), bf16)
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            shapes[f"{prefix}{name}.weight"] = ((FFN, HIDDEN), bf16)
        shapes[f"{prefix}mlp.down_proj.weight"] = ((HIDDEN, FFN), bf16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = ((HIDDEN,), fp32)
        layer, size = layer + 1, size + 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
    return shapes


def weights_of(mib: int, scale: float) -> dict[str, torch.Tensor]:
    base = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * scale
    return {
        name: base.to(dtype).repeat(-(-torch.Size(shape).numel() // base.numel()))[: torch.Size(shape).numel()].view(shape)
        for name, (shape, dtype) in shapes_of(mib).items()
    }  # fmt: skip


class BareHost:
    """Parameters and a version; no model behind them."""

    def __init__(self, parameters: dict[str, torch.Tensor]):
        from miles.rollout.engines.embedded.weight_state import WeightState

        self._parameters = parameters
        self.state = WeightState()

    def parameters(self) -> dict[str, torch.Tensor]:
        return self._parameters

    def aliases(self) -> dict[str, str]:
        return {}

    def pause(self, mode: str, owner: str) -> Future[None]:
        return self._at_once()

    def resume(self, owner: str) -> Future[None]:
        return self._at_once()

    def begin_update(self, begin: Any, now: float, client: Any = None) -> Any:
        return self.state.begin(begin, now, client=client)

    def flush_caches(self) -> None: ...

    def cached_prefix_tokens(self) -> int:
        return 0

    def finish_update(self, token: str) -> None:
        self.state.finish(token)

    def refuse_all(self) -> None: ...

    @staticmethod
    def _at_once() -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future


def serve(mib: int) -> None:
    """The engine process: prints its port, then serves until it is killed."""
    import uvicorn
    from starlette.applications import Starlette

    from miles.rollout.engines.embedded.weight_routes import register_routes
    from miles.rollout.engines.embedded.weight_service import WeightService

    torch.set_num_threads(1)
    app = Starlette()
    parameters = {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in shapes_of(mib).items()}
    register_routes(app, WeightService(BareHost(parameters)))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).run(sockets=[listener])


def memory(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class PeakMemory:
    """Bytes by which two processes' peak resident sizes rise over their sizes at the start of the block."""

    def __init__(self, *pids: int):
        self._pids = pids
        self.extra = 0

    def __enter__(self) -> PeakMemory:
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
        self._before = {pid: memory(pid, "VmRSS") for pid in self._pids}
        return self

    def __exit__(self, *exc: object) -> None:
        self.extra = sum(max(0, memory(pid, "VmHWM") - self._before[pid]) for pid in self._pids)


def timed(run: Callable[[int], None], repeats: int, first_version: int) -> list[float]:
    """Seconds of each repeat after one unmeasured first (it allocates, maps and plans)."""
    times = []
    for index in range(repeats + 1):
        start = time.perf_counter()
        run(first_version + index)
        times.append(time.perf_counter() - start)
    return times[1:]


def per_tensor(link: EngineLink, weights: dict[str, torch.Tensor], version: int) -> None:
    """The alternative: each tensor in shared memory of its own, one request each, checksummed like ours."""
    about = link.get("/parameter_table", timeout_s=60)
    common = {"plan_digest": "per-tensor", "selector": "all", "weight_version": str(version)}
    begin = {**common, "schema": SCHEMA, "run_id": "per-tensor", "pause": "retract", "timeout_s": 60.0}
    begin |= {"table_digest": about["tables"][0]["table_digest"], "engine_epoch": about["engine_epoch"]}
    session = link.post("/begin_weight_update", begin, timeout_s=60)["session"]
    for index, (name, tensor) in enumerate(weights.items()):
        data = as_bytes(tensor)
        shared = SharedBuffer(data.numel())
        shared.tensor.copy_(data)
        piece = Piece(name, dtype_name(tensor.dtype), tuple(tensor.shape), 0, data.numel())
        header = BucketHeader(version, index, data.numel(), (piece,), digest(shared.tensor))
        body = {**common, "session": session, "load_format": "miles_bucket", "flush_cache": False}
        body |= {"bucket": header.to_wire(), "handle": shared.handle}
        link.post("/update_weights_from_tensor", body, timeout_s=60)
        shared.close()
    link.post("/end_weight_update", {**common, "session": session, "buckets": len(weights)}, timeout_s=60)


def memcpy_seconds(nbytes: int, repeats: int) -> float:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    target.copy_(source)
    return statistics.median(timed(lambda _: target.copy_(source), repeats, 0))


def loopback_seconds(nbytes: int) -> float:
    """One raw TCP stream between two threads that hold no lock while they copy."""
    server = socket.create_server(("127.0.0.1", 0))
    payload, sink = bytes(1 << 22), bytearray(1 << 22)

    def receive() -> None:
        peer, _ = server.accept()
        while peer.recv_into(sink):
            pass

    thread = threading.Thread(target=receive)
    thread.start()
    with socket.create_connection(server.getsockname()) as sender:
        start = time.perf_counter()
        for _ in range(nbytes // len(payload)):
            sender.sendall(payload)
    thread.join()
    server.close()
    return time.perf_counter() - start


def changed(weights: dict[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.where(torch.rand(t.shape, generator=generator) < share, t + 1, t) for name, t in weights.items()
    }


class Bench:
    """One engine process and the rows measured against it."""

    def __init__(self, args: argparse.Namespace, scratch: Path):
        self.args, self.scratch = args, scratch
        self.weights = weights_of(args.mib, 1.0)
        self.nbytes = sum(t.numel() * t.element_size() for t in self.weights.values())
        self.rows: list[dict[str, Any]] = []
        command = [sys.executable, __file__, "--serve", "--mib", str(args.mib)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        self.engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.engine.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.engine.stdout.readline())}"
        self.limit_s = memcpy_seconds(self.nbytes, args.repeats)

    def add(self, name: str, times: list[float], **more: Any) -> None:
        seconds = statistics.median(times)
        row = {"name": name, "seconds": seconds, "gb_per_s": self.nbytes / seconds / 1e9, **more}
        row["of_memcpy"] = self.limit_s / seconds
        self.rows.append(row)
        extra = f"  extra {more['peak_extra'] / 2**20:7.0f} MiB" if "peak_extra" in more else ""
        print(
            f"{name:28} {seconds:8.3f} s  {row['gb_per_s']:6.2f} GB/s  {row['of_memcpy']:6.1%} of memcpy{extra}",
            flush=True,
        )

    def push(self, name: str, config: SyncConfig, weights: list[dict[str, torch.Tensor]] | None = None) -> None:
        sent: list[int] = []
        versions = weights or [self.weights]
        directory = self.scratch / name.replace(" ", "-")
        with WeightPusher([self.url], config, f"bench {name}", directory=directory) as pusher:

            def run(version: int) -> None:
                sent.append(pusher.push(versions[version % len(versions)].items(), version).nbytes)

            with PeakMemory(os.getpid(), self.engine.pid) as peak:
                times = timed(run, self.args.repeats, 1)
        self.add(name, times, peak_extra=peak.extra, bytes_sent=sent[-1])

    def everything(self) -> None:
        self.add("limit: memcpy", [self.limit_s])
        self.add("limit: TCP loopback", [loopback_seconds(self.nbytes)])
        bucket = self.args.bucket_mib << 20
        self.push("tensor", SyncConfig(transport="tensor", bucket_bytes=bucket))
        self.push("tensor one buffer", SyncConfig(transport="tensor", bucket_bytes=bucket, double_buffer=False))
        self.push("tensor no checksum", SyncConfig(transport="tensor", bucket_bytes=bucket, checksum="off"))
        link = EngineLink(self.url)
        with PeakMemory(os.getpid(), self.engine.pid) as peak:
            times = timed(lambda version: per_tensor(link, self.weights, version), self.args.repeats, 1)
        link.close()
        self.add("alternative: per tensor", times, peak_extra=peak.extra)
        self.push("broadcast gloo", SyncConfig(transport="broadcast", bucket_bytes=bucket))
        self.push("disk", SyncConfig(transport="disk", bucket_bytes=bucket))
        for share in (0.01, 0.1, 1.0):
            versions = [self.weights, changed(self.weights, share)]
            self.push(
                f"disk_delta {share:.0%} changed", SyncConfig(transport="disk_delta", bucket_bytes=bucket), versions
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=cpu_record.RESULTS / "weight_sync.json")
    args = parser.parse_args()
    if args.serve:
        serve(args.mib)
        return
    torch.set_num_threads(1)
    head = cpu_record.head()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args, Path(scratch))
        try:
            print(f"{bench.nbytes / 2**20:.0f} MiB, {len(bench.weights)} tensors, bucket {args.bucket_mib} MiB")
            bench.everything()
        finally:
            bench.engine.kill()
            bench.engine.wait()
    by_name = {row["name"]: row["seconds"] for row in bench.rows}
    ratios = {
        "tensor / per tensor": by_name["tensor"] / by_name["alternative: per tensor"],
        "checksum share": 1 - by_name["tensor no checksum"] / by_name["tensor"],
        "double buffer / one buffer": by_name["tensor"] / by_name["tensor one buffer"],
    }
    print("  ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
    record = {
        **head,
        "bytes": bench.nbytes,
        "tensors": len(bench.weights),
        "rows": bench.rows,
        "ratios": ratios,
    }
    cpu_record.write(args.out, record)


if __name__ == "__main__":
    main()
