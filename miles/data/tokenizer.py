"""A light tokenizer over Hugging Face tokenizer files, and a character tokenizer to write as such files.

Needs the `tokenizers` package only; importing `transformers` would cost each process seconds. Chat templates
are left to `transformers`. Encoding adds no special tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles.config import ConfigError
from miles.config.files import write_atomic
from miles.data.chat import ChatFormat
from miles.data.token_coverage import TokenCoverage

PAD, EOS = "<pad>", "<eos>"


class Tokenizer:
    """Reads `tokenizer.json`, `tokenizer_config.json` of a model folder.

    `eos_id` and `pad_id` are ints; a tokenizer without a padding token pads with `eos_id`. What the files ask for and a
    prompt must not suffer (cutting, padding, random splits) is switched off; `notes` says so.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        from tokenizers import Tokenizer as Backend

        folder = self.directory = Path(directory)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"tokenizer: {file} does not exist; name a Hugging Face model folder")
        try:
            self._backend = Backend.from_file(str(file))
            settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        except Exception as error:  # the Rust backend raises bare Exception on a damaged file
            raise ConfigError(f"tokenizer: cannot read {folder}: {error}") from error
        self.notes = tuple(f"{file}: {note}" for note in _switch_off(self._backend))
        self._coverage = TokenCoverage(self._backend)
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.eos_id = self._special(settings, "eos_token", folder)
        self.pad_id = self._special(settings, "pad_token", folder) if settings.get("pad_token") else self.eos_id

    @property
    def added_tokens(self) -> dict[int, str]:
        """Tokens that text is searched for before it is split, special ones among them; by id."""
        return {index: token.content for index, token in self._backend.get_added_tokens_decoder().items()}

    def special_in(self, text: str) -> str | None:
        """A token that the tokenizer marks as special and finds in `text`, where it would steer the model."""
        added = self._backend.get_added_tokens_decoder()
        special = {index: token for index, token in added.items() if token.special}
        found = next((token.content for token in special.values() if token.content in text), None)
        if found is None and self._backend.normalizer is not None and any(t.normalized for t in special.values()):
            # Other spellings become the token's.
            ids = self._backend.encode(text, add_special_tokens=False).ids
            found = next((special[index].content for index in ids if index in special), None)
        return found

    def text_of(self, index: int) -> str | None:
        """A token as the vocabulary spells it; None for an id without one."""
        return self._backend.id_to_token(index) if 0 <= index < 1 << 32 else None

    def id_of(self, text: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        return self._backend.token_to_id(text)

    def _special(self, settings: dict[str, Any], key: str, folder: Path) -> int:
        token = settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        index = self._backend.token_to_id(text) if text else None
        if index is None:
            raise ConfigError(f"tokenizer: {folder}/tokenizer_config.json names {key} {text!r}, not in the vocabulary")
        return index

    def encode(self, text: str) -> np.ndarray:
        """int64 [n]; `ConfigError` when a character has no token (a lost character would train silently)."""
        return np.asarray(self._encoding(text).ids, dtype=np.int64)

    def encode_marked(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """(`encode(text)`, bool [n]): marked are tokens with a character in one of the [start, end) `spans`."""
        encoding = self._encoding(text)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        marked = np.zeros(len(offsets), dtype=bool)
        for start, end in spans:
            marked |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        return np.asarray(encoding.ids, dtype=np.int64), marked

    def _encoding(self, text: str) -> Any:
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
            lost = self._coverage.lost(text, encoding.ids, encoding.offsets)
        except Exception as error:  # the Rust backend raises bare Exception
            known = self._backend.get_vocab()
            lost = sorted({c for c in text if c not in known})
            raise ConfigError(f"tokenizer: {text[:40]!r} has characters without a token: {lost} ({error})") from error
        if lost:
            raise ConfigError(
                f"tokenizer: {text[:40]!r} has characters without a token: {lost}; use a tokenizer that knows them, or "
                "take them out of the data"
            )
        return encoding

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        return self._backend.decode(list(map(int, ids)), skip_special_tokens=skip_special)

    def decode_batch(self, rows: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        lists = [row.tolist() if isinstance(row, np.ndarray) else list(map(int, row)) for row in rows]
        return self._backend.decode_batch(lists, skip_special_tokens=True)


def _switch_off(backend: Any) -> list[str]:
    """Clear what would change a prompt without a word; one line for each."""
    notes = []
    if backend.truncation is not None:
        notes.append(f"truncation to {backend.truncation['max_length']} tokens is not applied: prompts are never cut")
        backend.no_truncation()
    if backend.padding is not None:
        notes.append("padding is not applied: prompts stay as long as they are")
        backend.no_padding()
    if getattr(backend.model, "dropout", None):
        notes.append("dropout of merges is not applied: a text always has the same tokens")
        backend.model.dropout = None
    return notes


def char_vocabulary(alphabet: str, chat: ChatFormat | None = None) -> list[str]:
    """Tokens by id: `<pad>`, the end of an answer, the chat format's special tokens, the distinct characters in order."""
    special = (EOS,) if chat is None else (chat.turn_end, *chat.special)
    return [PAD, *special, *dict.fromkeys(alphabet)]


def build_char_tokenizer(
    alphabet: str, directory: str | os.PathLike[str], *, chat: ChatFormat | None = None
) -> Tokenizer:
    """Write a tokenizer with one token per character as real Hugging Face files; returns it loaded.

    Ids are those of `char_vocabulary`. `chat`: the tokenizer has its template and ends answers with its `turn_end`.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    if not alphabet:
        raise ConfigError("tokenizer: the alphabet is empty; name the characters of the task")
    tokens = char_vocabulary(alphabet, chat)
    eos, special = tokens[1], tokens[: 2 + (len(chat.special) if chat is not None else 0)]
    vocab = {token: index for index, token in enumerate(tokens)}
    # Without an unknown token the model refuses text outside the alphabet instead of losing it.
    backend = Backend(models.WordLevel(vocab, unk_token=""))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    write_atomic(folder / "tokenizer.json", backend.to_str(pretty=True))
    write_atomic(folder / "tokenizer_config.json", json.dumps(settings, indent=2))
    write_atomic(folder / "special_tokens_map.json", json.dumps({"eos_token": eos, "pad_token": PAD}, indent=2))
    if chat is not None:
        write_atomic(folder / "chat_template.jinja", chat.template)
    return Tokenizer(folder)
