"""Embedded engine against `transformers` generate on the CPU: same model, prompts, tokens and thread count, one run.

    python benchmarks/engine_cpu.py [--sequences 256 --prompt 4 --new 4 --layers 2 --hidden 64 --rounds 15]

The engine is measured over HTTP, requests and log-probs included; transformers in-process, sampling with scores
turned into log-probs. The two take turns inside the one run; medians are compared. `--groups` gives the number of
distinct prompts (a GRPO group repeats its prompt).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("sequences", 256), ("groups", 16), ("prompt", 4), ("new", 4), ("layers", 2), ("hidden", 64), ("rounds", 15)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def make_model(folder: Path, args: argparse.Namespace) -> Path:
    from miles.data.tokenizer import build_char_tokenizer
    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint

    build_char_tokenizer("0123456789=", folder / "tokenizer")
    shape = ModelShape(
        num_layers=args.layers, hidden_size=args.hidden, ffn_hidden_size=2 * args.hidden, head_dim=args.hidden // 4
    )
    return create_checkpoint(folder / "model", shape=shape, tokenizer_dir=folder / "tokenizer", seed=0)


def prompts_of(args: argparse.Namespace, round_: int) -> np.ndarray:
    rng = np.random.default_rng(round_)
    distinct = rng.integers(2, 13, (args.groups, args.prompt))
    return np.repeat(distinct, args.sequences // args.groups, axis=0)


async def engine_round(client, args: argparse.Namespace, round_: int) -> float:
    from miles.rollout.engine import GenerateRequest, SamplingParams

    sampling = SamplingParams(max_new_tokens=args.new, ignore_eos=True)
    requests = [
        GenerateRequest(ids, sampling, seed=round_ * 10**6 + i, rid=f"{round_}-{i}")
        for i, ids in enumerate(prompts_of(args, round_))
    ]
    started = time.perf_counter()
    results = await client.generate_many(requests)
    elapsed = time.perf_counter() - started
    assert all(len(r.tokens) == len(r.log_probs) == args.new for r in results)
    return elapsed


def transformers_round(model, args: argparse.Namespace, round_: int) -> float:
    import torch

    ids = torch.from_numpy(prompts_of(args, round_))
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=args.new,
            min_new_tokens=args.new, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        drawn = out.sequences[:, args.prompt :]
        log_probs = torch.stack(out.logits, 1).log_softmax(-1).gather(2, drawn[..., None])
    elapsed = time.perf_counter() - started
    assert log_probs.shape[:2] == (args.sequences, args.new)
    return elapsed


async def main() -> None:
    args = arguments()
    import torch

    from miles.rollout.config import EngineConfig
    from miles.rollout.engine import EngineClient
    from miles.rollout.engines.embedded import launch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_model(Path(folder), args)
        started = time.perf_counter()
        with launch(EngineConfig(), model_dir) as handle:
            ready = time.perf_counter() - started
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
            ours, theirs = [], []
            async with EngineClient(handle.url, token=handle.token) as client:
                for round_ in range(args.rounds + 2):
                    ours.append(await engine_round(client, args, round_))
                    theirs.append(transformers_round(model, args, round_))
    a, b = statistics.median(ours[2:]) * 1e3, statistics.median(theirs[2:]) * 1e3
    tokens = args.sequences * args.new
    print(f"{args.sequences} sequences ({args.groups} prompts) x {args.prompt}+{args.new} tokens, "
          f"{args.layers} layers, width {args.hidden}, 1 thread each, median of {args.rounds}")  # fmt: skip
    print(f"embedded engine over HTTP: {a:8.1f} ms  {tokens / a * 1e3:9.0f} tokens/s  (ready after {ready:.2f} s)")
    print(f"transformers generate    : {b:8.1f} ms  {tokens / b * 1e3:9.0f} tokens/s")
    print(f"ratio ours/theirs        : {a / b:8.3f}")


if __name__ == "__main__":
    asyncio.run(main())
