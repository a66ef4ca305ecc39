"""Process groups of one run: joins the processes and lays megatron-core's mesh over them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from miles.train.backend import ParallelLayout
from miles.train.config import ParallelConfig
from miles.train.errors import ParallelismError, TrainError
from miles.train.megatron.platform import Platform


@dataclass(frozen=True)
class Mesh:
    """Groups a rank needs outside megatron-core's own code. `dp_cp` spans the ranks that hold the same parameters."""

    layout: ParallelLayout
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    model_parallel: dist.ProcessGroup
    expert_tp: dist.ProcessGroup
    expert_dp: dist.ProcessGroup
    expert_model_parallel: dist.ProcessGroup


def join(
    parallel: ParallelConfig,
    platform: Platform,
    *,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    timeout_s: float,
    listener: socket.socket | None = None,
) -> Mesh:
    """Connect the ranks and create every group. Raises when the sizes do not multiply to the world size.

    `listener`: rank 0's socket, already bound to `master_port`, so that no other process can take the port between
    its choice and its use. One process alone needs neither address nor port.
    """
    if parallel.world_size != world_size:
        raise ParallelismError(
            f"train.parallel: tp*pp*cp*dp = {parallel.tp}*{parallel.pp}*{parallel.cp}*{parallel.dp} = "
            f"{parallel.world_size} but {world_size} processes were started"
        )
    timeout = timedelta(seconds=timeout_s)
    try:
        store: dist.Store
        if world_size == 1:
            store = dist.HashStore()
        else:
            store = dist.TCPStore(
                master_addr,
                master_port,
                world_size=world_size,
                is_master=rank == 0,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach() if listener is not None and rank == 0 else None,
            )
        dist.init_process_group(platform.collectives, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        raise TrainError(
            f"rank {rank} could not join {master_addr}:{master_port} within {timeout_s:g} s: {error}"
        ) from error
    return _lay_out(parallel, rank, world_size, timeout_s)


def _lay_out(parallel: ParallelConfig, rank: int, world_size: int, timeout_s: float) -> Mesh:
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    ps.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    # Dropout is refused everywhere, so no random stream has to differ between tensor-parallel ranks.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    layout = ParallelLayout(
        rank=rank,
        world_size=world_size,
        dp_rank=ps.get_data_parallel_rank(),
        dp_size=ps.get_data_parallel_world_size(),
        pp_size=parallel.pp,
        cp_rank=ps.get_context_parallel_rank(),
        cp_size=parallel.cp,
        ep_rank=ps.get_expert_model_parallel_rank(),
    )
    return Mesh(
        layout=layout,
        tp=ps.get_tensor_model_parallel_group(),
        pp=ps.get_pipeline_model_parallel_group(),
        cp=ps.get_context_parallel_group(),
        dp=ps.get_data_parallel_group(),
        dp_cp=ps.get_data_parallel_group(with_context_parallel=True),
        model_parallel=ps.get_model_parallel_group(),
        expert_tp=ps.get_expert_tensor_parallel_group(),
        expert_dp=ps.get_expert_data_parallel_group(),
        expert_model_parallel=ps.get_expert_tensor_model_pipeline_parallel_group(),
    )


@contextmanager
def bounded(what: str, rank: int, timeout_s: float) -> Iterator[None]:
    """Turn a collective that failed because another rank is gone or late into one clear error."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        lost = isinstance(error, dist.DistError) or any(mark in str(error).lower() for mark in _LOST_PEER)
        if not lost:
            raise
        raise TrainError(
            f"rank {rank}: {what} stopped because another rank died or did not answer within {timeout_s:g} s; "
            f"look at the other ranks' logs, then resume from the last checkpoint ({error})"
        ) from error


# How gloo and NCCL word a lost or late peer.
_LOST_PEER = ("gloo", "connection closed by peer", "connection reset by peer", "timed out", "nccl", "broken pipe")


def leave() -> None:
    """Destroy the mesh and the process group; the process may join another run."""
    from megatron.core import parallel_state as ps

    ps.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
