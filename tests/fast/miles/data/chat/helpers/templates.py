"""Chat templates that installed packages carry and ours, and a tokenizer with the special tokens that they write."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from miles.models import registry

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<|user|>",
    "<|assistant|>",
    "<|eot_id|>",
    "<|start|>",
    "<|end|>",
)
# Written like the older ones, which say for themselves where an answer begins.
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}{% else %}<<{{ m['role'] }}>> "
    "{{ m['content'] }} {% endif %}{% endfor %}"
)


def _templates() -> dict[str, str]:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    found = {path.stem: path.read_text() for path in (Path(spec.origin).parent / "chat_templates").glob("*.jinja")}
    assert len(found) > 50, "the installed package no longer carries templates"
    ours = {f"ours_{name}": registry.chat_format(name).template for name in registry.families()}
    return {**found, **ours, "plain": PLAIN}


TEMPLATES = _templates()
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers <b>& more</b>.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number", "description": "one"}, "b": {"type": "number"}},
            "required": ["a"],
        },
    },
}
CALL = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


def says(role: str, content: str, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def byte_tokenizer(path: Path) -> Path:
    """A byte-level tokenizer with special tokens, as Hugging Face files."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("i", "n"), ("in", "g"), ("Ġ", "t"), ("e", "r"), ("u", "s"), ("us", "er")]
    tokens = [*letters, *("".join(pair) for pair in merges)]
    backend = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    backend.save(str(path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}, "pad_token": "</s>"}
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named, "clean_up_tokenization_spaces": False})
    )
    return path
