"""`miles doctor`: what this machine has, what will run on it, and why the rest will not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from miles.config import ConfigError
from miles.orchestrate.joined_cluster import cluster_address
from miles.orchestrate.machine import memory_bytes
from miles.orchestrate.placed_cluster import known_facts
from miles.recipe.placement import ClusterConfig

PACKAGES = ("torch", "ray", "megatron-core", "transformers", "safetensors", "triton", "sglang", "transformer-engine")
GIB = 1 << 30


@dataclass(frozen=True)
class Ability:
    """Something a user may want to run, and whether this machine can."""

    name: str
    works: bool
    reason: str


def version_of(package: str) -> str | None:
    """Installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_names() -> list[str]:
    """Names of visible CUDA or HIP devices; empty without a GPU."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def abilities(versions: dict[str, str | None], gpus: list[str]) -> list[Ability]:
    """The list of abilities from installed versions and devices; pure."""
    core = [name for name in ("torch", "ray", "megatron-core", "safetensors") if versions.get(name) is None]
    base_reason = f"missing: {', '.join(core)}" if core else "torch, Ray and megatron-core are installed"
    no_gpu = "no GPU is visible" if not gpus else f"{len(gpus)} x {gpus[0]}"
    sglang = versions.get("sglang")
    engine = versions.get("transformer-engine")
    return [
        Ability("train on CPU (embedded engine, gloo)", not core, base_reason),
        Ability("train on GPU (local spec)", not core and bool(gpus), base_reason if core else no_gpu),
        Ability(
            "train on GPU with Transformer Engine",
            not core and bool(gpus) and engine is not None,
            no_gpu if not gpus else ("installed" if engine else "transformer-engine is not installed"),
        ),
        Ability(
            "SGLang rollout engine", sglang is not None, f"version {sglang}" if sglang else "sglang is not installed"
        ),
    ]


def cluster_lines() -> list[tuple[str, str]]:
    """What a run without `cluster.address` would be placed on: the cluster of RAY_ADDRESS, or one of its own."""
    try:
        address = cluster_address(ClusterConfig())
        if address is None:
            return [("cluster", "one of each run's own, on this machine (no RAY_ADDRESS)")]
        facts = known_facts(ClusterConfig(address=address))
    except ConfigError as error:
        return [("cluster", f"cannot be used: {error}")]
    except ImportError as error:
        return [("cluster", f"cannot be asked: {error}")]
    lines = [("cluster", f"{address}: {len(facts.nodes)} node{'' if len(facts.nodes) == 1 else 's'}")]
    for node in facts.nodes:
        here = " (this machine)" if node.id == facts.driver else ""
        memory = f"{node.memory_bytes / GIB:.1f} GiB"
        lines.append((f"node {node.address}", f"{node.cpus} CPUs, {node.gpus} GPUs, {memory}{here}"))
    return lines


def report(console: Console) -> None:
    """Print the machine, the libraries and the abilities."""
    versions = {name: version_of(name) for name in PACKAGES}
    gpus = gpu_names() if versions["torch"] else []
    table = Table(title="machine", show_header=False)
    table.add_row("python", f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}")
    table.add_row("cores", str(len(os.sched_getaffinity(0))))
    table.add_row("memory", f"{memory_bytes() / GIB:.1f} GiB")
    table.add_row("free disk here", f"{shutil.disk_usage(Path.cwd()).free / GIB:.1f} GiB")
    shared = Path("/dev/shm")
    table.add_row("shared memory", f"{shutil.disk_usage(shared).free / GIB:.1f} GiB" if shared.exists() else "none")
    table.add_row("GPUs", ", ".join(gpus) or "none")
    for name, said in cluster_lines():
        table.add_row(name, said)
    for name, version in versions.items():
        table.add_row(name, version or "not installed")
    console.print(table)
    for ability in abilities(versions, gpus):
        mark = "yes" if ability.works else "no "
        console.print(f"{mark}  {ability.name}: {ability.reason}", highlight=False)
