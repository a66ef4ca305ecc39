from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config import ConfigError
from miles.data.tokenizer import Tokenizer, build_char_tokenizer

ALPHABET = '0123456789=+ \n"\\é'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    build_char_tokenizer(ALPHABET, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer(folder)


@given(text=st.text(ALPHABET, max_size=40))
def test_text_survives_the_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_ids_are_in_order_of_the_alphabet_after_the_special_tokens(tokenizer):
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 2 + len(ALPHABET))
    np.testing.assert_array_equal(tokenizer.encode("01"), [2, 3])
    assert tokenizer.decode([2, 1, 0]) == "0"
    assert tokenizer.decode([2, 1], skip_special=False) == "0<eos>"
    assert tokenizer.decode_batch([[2, 3], [4, 1]]) == ["01", "2"]


def test_a_character_without_a_token_is_refused_not_lost(tokenizer):
    with pytest.raises(ConfigError, match=r"characters without a token: \['x'\]"):
        tokenizer.encode("1x2")


def test_transformers_loads_the_same_tokenizer(folder, tokenizer):
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(folder)
    text = "12=34\n5"
    assert other.encode(text) == tokenizer.encode(text).tolist()
    assert other.decode(other.encode(text)) == text
    assert (other.eos_token_id, other.pad_token_id, len(other)) == (1, 0, tokenizer.vocab_size)


def test_missing_or_damaged_files_are_named(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    with pytest.raises(ConfigError, match="names eos_token '<end>', not in the vocabulary"):
        Tokenizer(tmp_path)
