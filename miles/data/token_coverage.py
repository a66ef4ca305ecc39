"""Which characters of a text a tokenizer loses: no token carries them, or only its unknown token does.

Runs the stages of a `tokenizers` tokenizer one by one (normaliser, splitter, model). Tokenizers that lose nothing by
construction, such as byte-level ones with all 256 bytes, cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

# Stages that change characters but drop none.
_KEEPING_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
_KEEPING_SPLITTERS = frozenset(
    {"ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts", "Split", "FixedLength"}
)
# Characters around one that may decide what a normaliser does with it.
_CONTEXT = 8


class TokenCoverage:
    """Of one `tokenizers.Tokenizer`, whose settings must not change afterwards."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._normalizer, self._splitter, self._model = backend.normalizer, backend.pre_tokenizer, backend.model
        normalizers, splitters = _stages(self._normalizer), _stages(self._splitter)
        self._normalizer_keeps = all(map(_normalizer_keeps, normalizers))
        splitter_keeps = all(map(_splitter_keeps, splitters))
        byte_level = any(stage["type"] == "ByteLevel" for stage in (*normalizers, *splitters))
        settings = _unigram_settings(self._model)
        falls_back = settings.get("byte_fallback", getattr(self._model, "byte_fallback", False))
        self._bytes = _byte_tokens(self._model) if falls_back else {}
        self._unknown = _unknown_token(self._model, settings)
        self._complete = splitter_keeps and self._normalizer_keeps and self._covers(byte_level)
        self._added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
        self._dropped_at = lru_cache(maxsize=1 << 14)(self._dropped)

    def lost(self, text: str, ids: Iterable[int], offsets: Iterable[tuple[int, int]]) -> list[str]:
        """The lost characters of `text`, distinct, sorted. `ids`, `offsets`: how the tokenizer encoded it."""
        if self._complete:
            return []
        lost: set[str] = set()
        for piece in self._plain(text, ids, offsets):
            lost |= self._lost_in_normalizer(piece) | self._lost_in_model(piece)
        return sorted(lost)

    def _covers(self, byte_level: bool) -> bool:
        """Whether the model has a token for whatever bytes come."""
        if len(self._bytes) == 256:
            return True
        if type(self._model).__name__ != "BPE" or not byte_level:
            return False
        if self._model.continuing_subword_prefix or self._model.end_of_word_suffix:
            return False
        return all(self._model.token_to_id(letter) is not None for letter in _byte_letters())

    def _plain(self, text: str, ids: Iterable[int], offsets: Iterable[tuple[int, int]]) -> Iterator[str]:
        """The stretches of `text` between added tokens, which are taken as they are."""
        start = 0
        for index, (begin, end) in zip(ids, offsets, strict=True):
            # An added token may be the model's unknown token as well: then it stands for text that is not its own.
            if index in self._added and (index != self._unknown or text[begin:end] == self._added[index]):
                if start < begin:
                    yield text[start:begin]
                start = max(start, end)
        if start < len(text):
            yield text[start:]

    def _lost_in_normalizer(self, piece: str) -> set[str]:
        if self._normalizer_keeps:
            return set()
        normal = self._normalizer.normalize_str(piece)
        fewer = {character for character in set(piece) if normal.count(character) < piece.count(character)}
        lost = set()
        for place, character in enumerate(piece):
            if character in fewer and character not in lost:
                before, after = piece[max(place - _CONTEXT, 0) : place], piece[place + 1 : place + 1 + _CONTEXT]
                # At the edge of a window, not of the text, a letter keeps what is in it from being an edge.
                before = "x" + before if place > _CONTEXT else before
                after = after + "x" if place + 1 + _CONTEXT < len(piece) else after
                if self._dropped_at(before, character, after):
                    lost.add(character)
        return lost

    def _dropped(self, before: str, character: str, after: str) -> bool:
        """Whether the normal form is the same without the character."""
        return self._normalizer.normalize_str(before + character + after) == self._normalizer.normalize_str(
            before + after
        )

    def _lost_in_model(self, piece: str) -> set[str]:
        text = piece if self._normalizer is None else self._normalizer.normalize_str(piece)
        lost: set[str] = set()
        place = 0
        words = [(text, (0, len(text)))] if self._splitter is None else self._splitter.pre_tokenize_str(text)
        for word, (begin, end) in words:
            lost.update(text[place:begin])
            place = max(place, end)
            if not self._carries(word):
                lost |= self._culprits(text[begin:end])
        return lost | set(text[place:])

    def _culprits(self, span: str) -> set[str]:
        """Characters of a lossy word that are lossy alone; all of them when none is."""
        alone = set()
        for character in set(span):
            words = (
                [character] if self._splitter is None else [w for w, _ in self._splitter.pre_tokenize_str(character)]
            )
            if not words or not all(map(self._carries, words)):
                alone.add(character)
        return alone or set(span)

    def _carries(self, word: str) -> bool:
        """Whether the model's tokens, put together, are the word."""
        carried = b""
        prefix = getattr(self._model, "continuing_subword_prefix", None)
        suffix = getattr(self._model, "end_of_word_suffix", None)
        for number, token in enumerate(self._model.tokenize(word)):
            if token.id == self._unknown and word != self._model.id_to_token(token.id):
                return False
            value = token.value
            if value in self._bytes:
                carried += self._bytes[value]
                continue
            if number and prefix:
                value = value.removeprefix(prefix)
            carried += (value.removesuffix(suffix) if suffix else value).encode()
        return carried == word.encode()


def _stages(stage: Any) -> tuple[dict[str, Any], ...]:
    """The settings of a stage, a sequence taken apart."""
    if stage is None:
        return ()
    try:
        return tuple(_flat(json.loads(stage.__getstate__())))
    except Exception:  # a stage written in Python has no settings: nothing is known of it
        return ({"type": "unknown"},)


def _flat(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if settings["type"] != "Sequence":
        yield settings
        return
    for inner in settings.get("normalizers") or settings.get("pretokenizers") or ():
        yield from _flat(inner)


def _normalizer_keeps(stage: dict[str, Any]) -> bool:
    if stage["type"] == "Replace":
        # One character for another; a pattern may match many and leave fewer.
        return len(stage["pattern"].get("String", "")) == 1 and stage["content"] != ""
    return stage["type"] in _KEEPING_NORMALIZERS


def _splitter_keeps(stage: dict[str, Any]) -> bool:
    return stage["type"] in _KEEPING_SPLITTERS and stage.get("behavior") != "Removed"


def _unigram_settings(model: Any) -> dict[str, Any]:
    """What the library keeps to itself of a Unigram model; empty for others."""
    return json.loads(model.__getstate__()) if type(model).__name__ == "Unigram" else {}


def _unknown_token(model: Any, unigram: dict[str, Any]) -> int | None:
    text = getattr(model, "unk_token", None)
    return unigram.get("unk_id") if text is None else model.token_to_id(text)


def _byte_tokens(model: Any) -> dict[str, bytes]:
    """The tokens `<0x00>` to `<0xFF>` that the model has."""
    names = {f"<0x{value:02X}>": bytes([value]) for value in range(256)}
    return {name: value for name, value in names.items() if model.token_to_id(name) is not None}


def _byte_letters() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()
