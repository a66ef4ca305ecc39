"""A class of the user's own gives items, checked like a file's; its scorer runs where rewards do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles.config import ConfigError
from miles.data.config import DataConfig
from miles.data.prompts import PromptSource
from miles.data.tasks import build_task
from miles.data.tasks.user_task import MOST_ITEMS
from miles.data.tokenizer import build_char_tokenizer
from miles.models import registry

SUMS = """
class Sums:
    size = {size}

    def __init__(self, options, seed):
        self.most, self.seed = options["most"], seed

    def item(self, index):
        a, b = index % self.most, self.seed
        return {{"prompt": f"{{a}}+{{b}}=", "answer": {{"sum": a + b}}, "metadata": {{"a": a}}}}

    def score(self, completion, answer, metadata):
        return float(completion == str(answer["sum"]))
"""


def config(path: str, **options) -> DataConfig:
    data = {"task": "python", "python": {"path": path, "options": options}, "held_out_fraction": 0.0}
    return DataConfig.model_validate_json(json.dumps(data))


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str, name: str = "task.py") -> str:
        (tmp_path / name).write_text(text)
        return f"{tmp_path / name}"

    return write


def test_items_of_a_file_and_of_a_module(written, tmp_path, monkeypatch):
    file = written(SUMS.format(size=None))
    task = build_task(config(f"{file}:Sums", most=5), seed=3)
    assert (task.item(7).text, task.item(7).answer, task.item(7).metadata) == ("2+3=", {"sum": 5}, {"a": 2})
    (tmp_path / "sums_of_a_user.py").write_text(SUMS.format(size=4))
    monkeypatch.syspath_prepend(str(tmp_path))
    task = build_task(config("sums_of_a_user:Sums", most=9), seed=1)
    assert (task.size, task.item(5).text) == (4, "1+1="), "a size is an epoch"


def test_it_is_a_source_of_prompts_that_resumes(written, tmp_path):
    tokenizer = build_char_tokenizer("0123456789+=", tmp_path / "tokenizer")
    data = config(f"{written(SUMS.format(size=None))}:Sums", most=100)
    with PromptSource(data, tokenizer, 2) as source, PromptSource(data, tokenizer, 2) as again:
        source.next_groups(5)
        again.restore(source.state())
        assert (
            [p.text for p in again.next_groups(3)]
            == [p.text for p in source.next_groups(3)]
            == ["5+2=", "6+2=", "7+2="]
        )
    with PromptSource(config(f"{written(SUMS.format(size=6), 'b.py')}:Sums", most=100), tokenizer, 2) as source:
        assert len({p.text for p in source.next_groups(18)}) == 6


def test_messages_are_conversations(written, tmp_path):
    file = written(
        "class Chat:\n def __init__(self, options, seed): pass\n"
        " def item(self, index): return {'messages': [{'role': 'user', 'content': str(index)}], 'answer': None}\n"
    )
    tokenizer = build_char_tokenizer(
        "".join(map(chr, range(32, 127))) + "\n", tmp_path / "tokenizer", chat=registry.chat_format("qwen3")
    )
    with PromptSource(config(f"{file}:Chat"), tokenizer, 0) as source:
        assert source.task.has_conversations
        assert source.next_groups(2)[1].text == "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"


HEAD = "class T:\n def __init__(self, options, seed): self.n = 0\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module_at_all\n", "cannot import .*task.py: ModuleNotFoundError"),
        ("class Other: ...\n", "has no function T; define it there"),
        ("class T:\n def item(self, index): ...\n", r"does not take \(options, seed\)"),
        ("class T:\n def __init__(self, options, seed): 1 / 0\n", "T raised ZeroDivisionError"),
        (HEAD, r"has no method item; define item\(self, index\)"),
        (HEAD + " def item(self, index): return 1 + 'x'\n", r"item\(0\): .*raised TypeError"),
        (HEAD + " def item(self, index): return 'x'\n", r"item\(0\) is str; return a mapping with prompt or messages"),
        (HEAD + " def item(self, index): return {'prompt': 'x', 'level': 1}\n", "has the key 'level'; use prompt, mess"),
        (HEAD + " def item(self, index): return {'answer': 'x'}\n", "must have one of prompt and messages"),
        (HEAD + " def item(self, index): return {'prompt': ''}\n", "prompt is ''; return text that is not empty"),
        (HEAD + " def item(self, index): return {'prompt': 'x', 'answer': {1, 2}}\n", "answer and metadata must be JSON"),
        (HEAD + " def item(self, index): return {'prompt': 'x', 'metadata': [1]}\n", "metadata is list; return a mapping"),
        (HEAD + " def item(self, index): return {'messages': [{'role': 'u'}]}\n", r'messages\[0\].role is "u"; use one of'),
        (HEAD + " size = 0\n def item(self, index): return {'prompt': 'x'}\n", "size is 0; give the number of items"),
        (HEAD + f" size = {MOST_ITEMS + 1}\n def item(self, index): return {{'prompt': 'x'}}\n", "leave it out"),
        (
            HEAD + " def item(self, index):\n  self.n += 1\n  return {'prompt': str(self.n)}\n",
            "gave two items for index 0; make item depend on nothing but options, seed and index",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_class_is_told_with_its_option(written, source, said):
    with pytest.raises(ConfigError, match=said) as raised:
        build_task(config(f"{written(source)}:T"), 0)
    assert str(raised.value).startswith("data.python.path")


@pytest.mark.parametrize("path", ["", "task.py", "a-b:T", ":T"])
def test_what_names_no_class_is_refused(path):
    with pytest.raises(ValueError, match="names no function; write it as"):
        config(path)
