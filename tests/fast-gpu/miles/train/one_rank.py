"""One rank of the megatron backend on a fixed batch: `one_rank.py '{"model": ..., ...}'`, prints its results as JSON.

A process of its own, because a process that has the CPU shim cannot use CUDA and a mesh is joined once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from miles.algos.config import AlgoConfig
from miles.algos.step_batches import prepare_steps
from miles.data.batch_layout import BatchLayout
from miles.data.sample import Sample, Status
from miles.data.schedule import ScheduleConfig
from miles.train.config import OptimizerConfig, ParallelConfig, TrainConfig
from miles.train.megatron.backend import MegatronBackend


def samples(grouped: bool = False) -> list[Sample]:
    generator = np.random.default_rng(0)
    made = []
    for index in range(32):
        before, after = int(generator.integers(1, 20)), int(generator.integers(1, 40))
        tokens = generator.integers(0, 15, before + after)
        if grouped and index % 4:
            before = made[-1].prompt_length
            tokens = np.concatenate([made[-1].tokens[:before], generator.integers(0, 15, after)])
        made.append(
            Sample(
                f"s{index}",
                index // 4,
                index,
                tokens,
                before,
                reward=float(generator.random()),
                status=Status.COMPLETED,
                old_log_probs=-generator.uniform(0.5, 4.0, after).astype(np.float32),
            )
        )
    return made


def main(
    *,
    model: str,
    device: str,
    precision: str,
    rank: int = 0,
    port: int = 0,
    resume_in: str = "",
    fused: str = "auto",
    grouped: bool = False,
    **parallel: int,
) -> dict:
    """Two steps (`grouped`: the samples of a group share their prompt); with `resume_in` a third one, and the third one again from a checkpoint written there before it."""
    layout = ParallelConfig(**parallel)
    backend = MegatronBackend(
        config=TrainConfig(
            device=device,
            precision=precision,
            optimizer=OptimizerConfig(lr=1e-3),
            parallel=layout,
            timeout_s=60,
            fused_loss=fused,
        ),
        algo=AlgoConfig(),
        model_dir=Path(model),
        rank=rank,
        world_size=layout.world_size,
        device=f"cuda:{rank}" if device == "cuda" else device,
        master_addr="127.0.0.1",
        master_port=port,
        seed=0,
    )
    backend.init()
    backend.load()
    rows = BatchLayout("thd", pad_multiple=layout.tp if layout.sp else 1)
    schedule = ScheduleConfig(layout=rows, max_tokens_per_gpu=512, data_parallel=layout.dp)
    prepared = prepare_steps(samples(grouped), AlgoConfig(), schedule)
    batch = prepared.steps[0].for_rank(backend.parallel_layout.dp_rank)
    scores = np.concatenate(backend.score(batch, model="policy", output="log_probs")).tolist()
    result = {"scores": scores, "curve": [backend.step(batch) for _ in range(2)]}
    if resume_in:
        backend.save(Path(resume_in), extra={"step": 2})
        result["again"] = backend.step(batch)
        backend.load_checkpoint(Path(resume_in))
        result["repeated"] = backend.step(batch)
    return result


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
