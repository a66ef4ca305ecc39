"""The supervised loss and its gradient are those of TRL's own `SFTTrainer`, from the same messages and the same weights.

TRL renders, encodes, masks and batches by itself; ours goes the way of a run, from the file to `Backend.step`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ANSWERS = [
    [("user", "1+2"), ("assistant", "3")],
    [("user", "12+30"), ("assistant", "42"), ("user", "-2"), ("assistant", "40")],
    [("system", "9"), ("user", "7"), ("assistant", "777=777")],
    [("user", "0"), ("assistant", "0-0")],
    [("user", "5-4-3"), ("assistant", "-2"), ("user", "+3"), ("assistant", "1"), ("user", "="), ("assistant", "1=1")],
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)


def rows() -> list[dict[str, object]]:
    return [{"messages": [{"role": role, "content": text} for role, text in row]} for row in ANSWERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from miles.data.tokenizer import build_char_tokenizer
    from miles.models import registry
    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint

    base = tmp_path_factory.mktemp("sft")
    build_char_tokenizer(
        "".join(map(chr, range(32, 127))) + "\n", base / "tokenizer", chat=registry.chat_format("qwen3")
    )
    (base / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    shape = ModelShape(num_layers=2, hidden_size=32, ffn_hidden_size=64, head_dim=8, init_std=0.2)
    return create_checkpoint(base / "model", shape=shape, tokenizer_dir=base / "tokenizer", seed=3)


def our_samples(folder: Path, path: Path):
    from miles.data.config import DataConfig
    from miles.data.supervised.source import ExampleSource
    from miles.data.tokenizer import Tokenizer

    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    config = {"task": "jsonl", "jsonl": {"path": str(path), "messages_key": "messages"}, "held_out_fraction": 0.0}
    source = ExampleSource(DataConfig.model_validate_json(json.dumps(config)), Tokenizer(folder), 0)
    return source.next_samples(len(ANSWERS))


@pytest.fixture(scope="module")
def ours(folder, ranks, toolbox, tmp_path_factory):
    """(loss, gradient norm) by layout and token budget of a micro-batch. Forked before torch differentiates here."""
    from miles.algos.config import AlgoConfig

    algo = AlgoConfig(loss="sft", reduction="token_mean")
    samples = our_samples(folder, tmp_path_factory.mktemp("rows") / "rows.jsonl")

    def step(layout: str, tokens: int, dp: int):
        batch = toolbox.batch(samples, algo=algo, layout=layout, tokens=tokens, dp=dp)

        def body(rank, world, port):
            backend = toolbox.backend(folder, rank, world, port, algo=algo, dp=dp)
            return backend.step(batch.for_rank(rank))

        return ranks(body, dp)[0]

    return {"packed": step("thd", 8192, 1), "small packs": step("thd", 40, 1), "rows": step("bshd", 64, 1), "two ranks": step("thd", 64, 2)}  # fmt: skip


@pytest.fixture(scope="module")
def theirs(ours, folder, tmp_path_factory) -> tuple[float, float, int]:
    """(loss, gradient norm, learnt tokens) of TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        assistant_only_loss=True,
        per_device_train_batch_size=len(ANSWERS),
        max_length=None,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"),
        args=arguments,
        train_dataset=Dataset.from_list(rows()),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    (batch,) = list(trainer.get_train_dataloader())
    learnt = int((batch["labels"] != -100).sum())
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(learnt))
    loss.backward()
    squares = [parameter.grad.square().sum() for parameter in trainer.model.parameters()]
    return float(loss.detach()), float(torch.stack(squares).sum().sqrt()), learnt


@pytest.mark.parametrize("how", ["packed", "small packs", "rows", "two ranks"])
def test_loss_and_gradient_norm_equal_trl(ours, theirs, how):
    loss, norm, _ = theirs
    assert ours[how]["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert ours[how]["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert loss > 1.0


def test_as_many_tokens_are_learnt(folder, theirs, tmp_path):
    samples = our_samples(folder, tmp_path / "rows.jsonl")
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == theirs[2]
    # The answers' characters, and the end of each.
    written = [text for row in ANSWERS for role, text in row if role == "assistant"]
    assert theirs[2] == sum(map(len, written)) + len(written)
