from __future__ import annotations

import pytest

from miles.data.packing import AttentionLayer
from miles.models import registry
from miles.models.config import ModelShape
from miles.train.flops import flops_shape

SPECIAL = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
HIDDEN, LAYERS, VOCAB, WIDTH = 32, 2, 20, 64
SHAPE = {"num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": WIDTH, "head_dim": 8}


@pytest.fixture
def dense():
    return registry.by_name("qwen3").hf_config(ModelShape(**SHAPE), VOCAB, SPECIAL)


def attention(hf) -> int:
    """Weights of one layer's attention and norms."""
    query, key_value = hf["num_attention_heads"] * 8, hf["num_key_value_heads"] * 8
    return HIDDEN * (2 * query + 2 * key_value) + 2 * HIDDEN + 2 * 8


@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_model_counts_every_matrix_and_the_vocabulary_once(dense, tied):
    shape = flops_shape(dense | {"tie_word_embeddings": tied})
    per_layer = attention(dense) + 3 * HIDDEN * WIDTH
    assert shape.active_params == LAYERS * per_layer + VOCAB * HIDDEN + HIDDEN
    assert shape.attention == (AttentionLayer(dense["num_attention_heads"], 8, 8),) * LAYERS


def test_experts_count_by_the_share_that_a_token_takes():
    experts = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 16}
    hf = registry.by_name("qwen3_moe").hf_config(ModelShape(**SHAPE, **experts), VOCAB, SPECIAL)
    per_layer = attention(hf) + 8 * HIDDEN + 2 * 3 * HIDDEN * 16
    assert flops_shape(hf | {"tie_word_embeddings": False}).active_params == (
        LAYERS * per_layer + VOCAB * HIDDEN + HIDDEN
    )
