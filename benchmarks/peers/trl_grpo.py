"""The peer of `benchmarks/grpo_cpu.py`: TRL's GRPOTrainer with transformers generate on the copy-digits task.

Same task, scorer, tokenizer files, model shape (or folder), prompts and group size as ours. Writes one JSON object a
step to `--out`: step, reward_mean, seconds since the process started. Run by the benchmark, or alone:

    python benchmarks/peers/trl_grpo.py --seed 1 --steps 200 --out trl.jsonl
"""

from __future__ import annotations

import time

STARTED = time.time()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from miles.data.config import CopyDigitsConfig  # noqa: E402
from miles.data.tasks.copy_digits import CopyDigits  # noqa: E402
from miles.data.tokenizer import build_char_tokenizer  # noqa: E402

IMPORTED = time.time()


class StepLog(TrainerCallback):
    """One line a step; seconds are wall time since the process started."""

    def __init__(self, path: Path):
        self._file = path.open("w", encoding="utf-8")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            line = {"step": state.global_step, "reward_mean": logs["reward"], "at_s": time.time() - STARTED}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def build_model(folder: str | None, vocab: int, pad_id: int, eos_id: int):
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            initializer_range=0.02,
            pad_token_id=pad_id,
            eos_token_id=eos_id,
            bos_token_id=None,
        )
    )


def settings(args: argparse.Namespace, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=args.prompts * args.group,
        num_generations=args.group,
        max_completion_length=args.new_tokens,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        warmup_steps=args.warmup,
        weight_decay=args.weight_decay,
        adam_beta1=args.beta1,
        adam_beta2=args.beta2,
        max_grad_norm=args.clip_grad,
        temperature=1.0,
        beta=0.0,
        num_iterations=args.iterations,
        epsilon=0.2,
        loss_type=args.loss,
        scale_rewards=args.scale,
        entropy_coef=args.entropy,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=args.seed,
        log_completions=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=None, help="start from this Hugging Face folder instead of random weights")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--digits", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--loss", default="dapo")
    parser.add_argument("--scale", default="group")
    parser.add_argument("--entropy", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_seed(args.seed)

    task = CopyDigits(CopyDigitsConfig(digits=args.digits), args.seed)
    items = [task.item(index) for index in range(args.prompts * args.steps)]
    with tempfile.TemporaryDirectory() as folder:
        light = build_char_tokenizer(task.alphabet, folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
        trainer = GRPOTrainer(
            model=build_model(args.model, light.vocab_size, light.pad_id, light.eos_id),
            args=settings(args, folder),
            train_dataset=Dataset.from_dict(
                {"prompt": [item.text for item in items], "answer": [item.answer for item in items]}
            ),
            reward_funcs=lambda completions, answer, **kwargs: [
                task.score(text, type(items[0])("", wanted)) for text, wanted in zip(completions, answer, strict=True)
            ],
            processing_class=tokenizer,
            callbacks=[StepLog(args.out)],
        )
        ready = time.time()
        trainer.train()
        trained = time.time()
        trainer.save_model(folder)
    summary = {
        "import_s": IMPORTED - STARTED,
        "setup_s": ready - IMPORTED,
        "train_s": trained - ready,
        "process_s": time.time() - STARTED,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "threads": torch.get_num_threads(),
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
    }
    args.out.with_suffix(".summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
