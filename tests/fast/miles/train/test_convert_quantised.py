"""hf-to-mcore of a packed checkpoint says so in one line, not in one for each scale."""

from __future__ import annotations

import pytest

from miles.data.tokenizer import build_char_tokenizer
from miles.models.config import ModelShape
from miles.models.create import create_checkpoint
from miles.models.errors import ModelError
from miles.quant.convert import to_nvfp4
from miles.train.convert import hf_to_checkpoint


def test_packed_experts_are_refused_with_what_to_give_instead(tmp_path):
    build_char_tokenizer("0123456789=", tmp_path / "tokenizer")
    shape = ModelShape(expert_ffn_hidden_size=64)
    tokenizer = tmp_path / "tokenizer"
    model = create_checkpoint(tmp_path / "m", family="qwen3_moe", shape=shape, tokenizer_dir=tokenizer, seed=0)
    to_nvfp4.convert(model, tmp_path / "nvfp4")
    with pytest.raises(ModelError, match=r"config\.json says modelopt NVFP4; .*; give the bf16") as raised:
        hf_to_checkpoint(tmp_path / "nvfp4", tmp_path / "checkpoints")
    assert len(str(raised.value)) < 400
    assert not (tmp_path / "checkpoints").exists()
