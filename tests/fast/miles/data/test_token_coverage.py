"""Text is encoded whole or refused, with every kind of tokenizer file."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from miles.config import ConfigError
from miles.data.tokenizer import Tokenizer

LETTERS = "abcdef ▁"


def load(tmp_path, model, *, normalizer=None, splitter=None, decoder=None, change=None) -> Tokenizer:
    backend = Backend(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if splitter is not None:
        backend.pre_tokenizer = splitter
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    if change is not None:
        change(backend)
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return Tokenizer(tmp_path)


def vocabulary(letters, *more):
    return {token: index for index, token in enumerate([*more, *letters])}


def bytes_of(*, without="") -> dict[str, int]:
    return vocabulary([letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter not in without])


def byte_level():
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def lossy(tmp_path) -> dict[str, Tokenizer]:
    """Tokenizers that know `LETTERS` at most, each losing in another place."""

    def make(name, model, **stages):
        folder = tmp_path / name
        folder.mkdir()
        return load(folder, model, **stages)

    letters = vocabulary(LETTERS, "<unk>")
    whole = models.BPE(bytes_of(), [])
    return {
        "bpe that drops": make("drops", models.BPE(vocabulary(LETTERS), [])),
        "bpe with an unknown token": make("unknown", models.BPE(letters, [], unk_token="<unk>")),
        "bpe with a fused unknown token": make("fused", models.BPE(letters, [], unk_token="<unk>", fuse_unk=True)),
        "bpe that falls back to few bytes": make(
            "few", models.BPE(vocabulary(LETTERS, "<0xC3>"), [], byte_fallback=True)
        ),
        "unigram": make("unigram", models.Unigram([("<unk>", 0.0)] + [(c, -1.0) for c in LETTERS], unk_id=0)),
        "word pieces": make(
            "pieces",
            models.WordPiece(letters | {f"##{c}": 100 + i for i, c in enumerate(LETTERS)}, unk_token="<unk>"),
        ),
        "words": make(
            "words",
            models.WordLevel(letters, unk_token="<unk>"),
            splitter=pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"),
        ),
        "words that are all refused": make(
            "refused",
            models.WordLevel(vocabulary(LETTERS), unk_token=""),
            splitter=pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"),
        ),
        "a normaliser that drops": make(
            "normaliser",
            whole,
            normalizer=normalizers.Replace(Regex("[^a-f ▁]"), ""),
            splitter=byte_level(),
        ),
        "a splitter that drops": make(
            "splitter",
            whole,
            splitter=pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("[^a-f ▁]"), "removed"), byte_level()]),
        ),
    }


@pytest.fixture(scope="module")
def losing(tmp_path_factory):
    return lossy(tmp_path_factory.mktemp("lossy"))


KINDS = (
    "bpe that drops",
    "bpe with an unknown token",
    "bpe with a fused unknown token",
    "bpe that falls back to few bytes",
    "unigram",
    "word pieces",
    "words",
    "words that are all refused",
    "a normaliser that drops",
    "a splitter that drops",
)


@pytest.mark.parametrize("kind", KINDS)
@given(known=st.text(LETTERS, max_size=12), more=st.text("é☃中z\x00😀", max_size=3), place=st.integers(0, 12))
def test_text_outside_the_vocabulary_is_refused_with_its_characters_and_other_text_is_not(
    losing, kind, known, more, place
):
    text = known[:place] + more + known[place:]
    lost = None
    try:
        losing[kind].encode(text)
    except ConfigError as error:
        lost = str(error)
    if kind == "word pieces" and more:  # a word without one of its pieces is unknown as a whole
        assert lost is not None
        assert all(repr(character) in lost for character in more)
        return
    assert (lost is None) == (more == "")
    if more:
        assert f"characters without a token: {sorted(set(more))}" in lost


def test_a_lost_character_at_the_end_does_not_hide_behind_a_wider_one(losing):
    for text in ("zé", "éz", "a☃", "☃a", "z中"):
        with pytest.raises(ConfigError, match="without a token"):
            losing["bpe that drops"].encode(text)


WHOLE = {
    "byte level": {"model": models.BPE(bytes_of(), []), "splitter": byte_level(), "decoder": decoders.ByteLevel()},
    "byte level, composed first": {
        "model": models.BPE(bytes_of(), []),
        "normalizer": normalizers.NFC(),
        "splitter": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+|\w+|[^\s\w]+"), "isolated"), byte_level()]),
        "decoder": decoders.ByteLevel(),
    },
    "bytes as a last resort": {
        "model": models.BPE(vocabulary("ab▁", *(f"<0x{value:02X}>" for value in range(256))), [], byte_fallback=True),
        "normalizer": normalizers.Replace(" ", "▁"),
        "decoder": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    },
    "unigram with bytes": {
        "model": models.Unigram(
            [("<unk>", 0.0), ("ab", -1.0), *((f"<0x{value:02X}>", -5.0) for value in range(256))], 0, byte_fallback=True
        ),
        "decoder": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def keeping(tmp_path_factory):
    return {name: load(tmp_path_factory.mktemp("whole"), **stages) for name, stages in WHOLE.items()}


@pytest.mark.parametrize("kind", WHOLE)
@given(text=st.text(max_size=20))
def test_a_tokenizer_that_knows_every_byte_takes_every_text(keeping, kind, text):
    tokenizer = keeping[kind]
    expected = unicodedata.normalize("NFC", text) if "composed" in kind else text
    assert tokenizer.decode(tokenizer.encode(text)) == (expected if "last" not in kind else expected.replace("▁", " "))


def test_half_a_character_is_a_loss(tmp_path):
    """é is two bytes; the vocabulary has one of them."""
    letter = byte_level().pre_tokenize_str("é")[0][0]
    tokenizer = load(tmp_path, models.BPE(bytes_of(without=letter[1]), []), splitter=byte_level())
    assert len(tokenizer.encode("ok è")) > 0
    with pytest.raises(ConfigError, match=r"characters without a token: \['é'\]"):
        tokenizer.encode("ok é")


@pytest.mark.parametrize(
    ("normalizer", "text", "lost"),
    [
        (normalizers.Strip(), " ab", [" "]),
        (normalizers.Strip(), "ab\n", ["\n"]),
        (normalizers.Strip(), " " * 40 + "a", [" "]),
        (normalizers.Strip(), "a" + " " * 40 + "b", []),
        (normalizers.Strip(), "a b", []),
        (normalizers.StripAccents(), "ab", []),
        (normalizers.Replace(Regex(" {2,}"), " "), "a   b", [" "]),
        (normalizers.Replace(Regex(" {2,}"), " "), "a b c", []),
        (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), "e\u0301a", ["\u0301"]),
        (normalizers.BertNormalizer(), "a\x01b", ["\x01"]),
        (normalizers.Lowercase(), "ABC", []),
        (normalizers.NFC(), "e\u0301", []),
        (normalizers.NFKC(), "ﬁ①", []),
    ],
)
def test_what_a_normaliser_drops_is_a_loss_and_what_it_changes_is_none(normalizer, text, lost, tmp_path):
    tokenizer = load(tmp_path, models.BPE(bytes_of(), []), normalizer=normalizer, splitter=byte_level())
    if not lost:
        assert len(tokenizer.encode(text)) > 0
        return
    with pytest.raises(ConfigError) as error:
        tokenizer.encode(text)
    assert f"characters without a token: {lost}" in str(error.value)


def test_spaces_that_a_splitter_drops_are_a_loss(tmp_path):
    tokenizer = load(
        tmp_path, models.WordLevel(vocabulary(["ab", "cd"], "<unk>"), unk_token="<unk>"), splitter=pre_tokenizers.Whitespace()
    )  # fmt: skip
    assert tokenizer.encode("ab").tolist() == [1]
    with pytest.raises(ConfigError, match=r"without a token: \[' '\]"):
        tokenizer.encode("ab cd")


def test_added_tokens_are_taken_as_they_are_and_the_unknown_token_by_its_own_text_too(tmp_path):
    def add(backend):
        backend.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("☃☃", special=True)])

    tokenizer = load(tmp_path, models.BPE(vocabulary("ab", "<unk>"), [], unk_token="<unk>"), change=add)
    assert tokenizer.encode("a☃☃b<unk><eos>").tolist() == [1, tokenizer.vocab_size - 1, 2, 0, tokenizer.eos_id]
    for text in ("a☃b", "☃☃z☃☃", "<unk>z"):
        with pytest.raises(ConfigError, match="without a token"):
            tokenizer.encode(text)


def test_cutting_padding_and_dropout_are_switched_off_with_a_note(tmp_path):
    merges = [("a", "a"), ("aa", "aa")]

    def spoil(backend):
        backend.enable_truncation(4)
        backend.enable_padding(length=16, pad_id=0)
        backend.model.dropout = 0.5

    tokenizer = load(tmp_path, models.BPE(vocabulary("ab", "aa", "aaaa"), merges), change=spoil)
    found = {tuple(tokenizer.encode("aaaab" * 3).tolist()) for _ in range(20)}
    assert found == {(1, 3) * 3}
    assert [note.rpartition(" is not applied")[0].rpartition("tokenizer.json: ")[2] for note in tokenizer.notes] == [
        "truncation to 4 tokens",
        "padding",
        "dropout of merges",
    ]
    assert all(note.startswith(f"{tmp_path}/tokenizer.json: ") for note in tokenizer.notes)


def test_a_tokenizer_without_such_settings_has_no_notes(tmp_path):
    assert load(tmp_path, models.BPE(vocabulary("ab"), [])).notes == ()


def test_a_post_processor_that_trims_offsets_changes_no_verdict(tmp_path):
    def trim(backend):
        backend.post_processor = processors.ByteLevel(trim_offsets=True)

    assert len(load(tmp_path, models.BPE(vocabulary("a "), []), change=trim).encode(" a a ")) == 5
