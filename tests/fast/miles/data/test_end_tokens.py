"""An answer ends at every token that a file names; what cannot be an end is refused with all three values."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from miles.config import ConfigError
from miles.data.end_tokens import EndTokens, read_end_tokens

# 0 a, 1 b, 2 <pad>, 3 <end>, 4 <turn>, 5 <lone>
VOCABULARY = {"a": 0, "b": 1, "<pad>": 2, "<end>": 3}


@pytest.fixture
def make(tmp_path):
    def make(config=None, generation=None, tokenizer="<end>", **more):
        backend = Backend(models.BPE(VOCABULARY, []))
        backend.add_special_tokens([AddedToken(text, special=True) for text in ("<pad>", "<end>", "<turn>")])
        backend.add_tokens([AddedToken("<lone>", special=False)])
        (tmp_path / "tokenizer.json").write_text(backend.to_str())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer, **more}))
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8, "eos_token_id": config}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "ids", "noted"),
    [
        (3, 3, "<end>", (3,), False),
        (3, None, "<end>", (3,), False),
        (3, [4, 3], "<end>", (3, 4), False),
        ([4, 3], [3, 4], {"content": "<turn>"}, (3, 4), False),
        (3, 3, "<turn>", (3, 4), True),
        (None, None, "<end>", (3,), True),
        (4, None, "<end>", (3, 4), True),
        (4, 3, "<end>", (3, 4), True),
        (4, 5, "<end>", (3, 4, 5), True),
        (3, [], "<end>", (3,), True),
        (1, 1, "b", (1,), False),  # what the tokenizer itself calls its end may look like text
    ],
)
def test_the_union_of_what_the_files_name_ends_an_answer(make, config, generation, tokenizer, ids, noted):
    found = read_end_tokens(make(config, generation, tokenizer))
    assert found.ids == ids
    assert (found.note is not None) is noted


def test_a_note_spells_the_three_with_their_values(make):
    folder = make(4, 5, "<end>")
    assert read_end_tokens(folder).note == (
        f"{folder}: config.json names 4 ('<turn>'), generation_config.json names 5 ('<lone>'), the tokenizer names 3 "
        "('<end>'); an answer ends at any of them (3, 4, 5)"
    )
    assert "config.json names no end token" in read_end_tokens(make(None, None)).note


@pytest.mark.parametrize(
    ("config", "generation", "wrong"),
    [
        (8, 3, "end token 8 is outside the model's vocabulary of 8; config.json names 8, generation_config.json names 3"),
        (3, [3, 99], "end token 99 is outside the model's vocabulary of 8"),
        (7, None, "end token 7 has no token in the tokenizer; config.json names 7, the tokenizer names 3 ('<end>')"),
        (3, 1, "end token 1 is the ordinary token 'b', at which any answer could be cut"),
        (3, -1, "generation_config.json: eos_token_id -1 must be a token id"),
        (3, True, "generation_config.json: eos_token_id True must be a token id"),
        ("3", None, "config.json: eos_token_id '3' must be a token id"),
        ([3, None], None, "config.json: eos_token_id [3, None] must be a token id"),
        (1 << 70, None, f"end token {1 << 70} is outside the model's vocabulary of 8"),
    ],
)  # fmt: skip
def test_an_id_that_cannot_be_an_end_is_refused_with_what_each_file_says(make, config, generation, wrong):
    with pytest.raises(ConfigError, match=re.escape(wrong)):
        read_end_tokens(make(config, generation))


def test_a_token_with_two_ids_is_refused(make):
    decoder = {"4": {"content": "<end>"}, "2": {"content": "<pad>"}}
    with pytest.raises(ConfigError, match=r"'<end>' is 4 in tokenizer_config\.json and 3 in tokenizer\.json"):
        read_end_tokens(make(3, 3, added_tokens_decoder=decoder))
    assert read_end_tokens(make(3, 3, added_tokens_decoder={"3": {"content": "<end>"}, "9": "odd"})).ids == (3,)


def test_the_map_of_special_tokens_is_heard_too(make):
    folder = make(3, 3)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<turn>"}}))
    assert read_end_tokens(folder).ids == (3, 4)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(ConfigError, match=r"special_tokens_map\.json: names eos_token '<none>', not in the vocabulary"):
        read_end_tokens(folder)


def test_without_a_tokenizer_the_configurations_speak(make):
    folder = make(3, 4)
    (folder / "tokenizer.json").unlink()
    assert read_end_tokens(folder).ids == (3, 4)
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").unlink()
    assert read_end_tokens(folder) == EndTokens(())


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "[" * 100_000, "\udcff"])
def test_a_file_that_is_no_object_is_named(make, name, text):
    folder = make(3, 3)
    (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=re.escape(name)):
        read_end_tokens(folder)
