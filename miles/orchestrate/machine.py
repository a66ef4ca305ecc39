"""What this machine has: looked at without starting Ray, and without importing torch where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path

from miles.orchestrate.placement import LOOPBACK, ClusterFacts, NodeFacts

# Processes, each with its own copy of torch: more than any machine has cores for.
MOST_PROCESSES = 1024
# Control devices of the NVIDIA and AMD drivers.
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
LOCAL = "local"


def visible_gpus() -> int:
    """GPUs that torch can use here; CUDA_VISIBLE_DEVICES and its AMD twins count."""
    if not any(driver.exists() for driver in DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def memory_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def this_machine() -> ClusterFacts:
    """The cluster that the command starts for itself: one node, with a process for every actor that fits at all."""
    node = NodeFacts(LOCAL, LOOPBACK, cpus=MOST_PROCESSES, gpus=visible_gpus())
    return ClusterFacts((node,), driver=LOCAL)
