"""Qwen3 chat format: ChatML turns, a thinking block in the answer, tool calls as JSON inside tags.

Only what is fixed by the format stands here; a checkpoint's own `chat_template` is what renders text.
"""

from __future__ import annotations

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
THINK = ("<think>", "</think>")
TOOL_CALL = ("<tool_call>", "</tool_call>")


def render(messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
    """Plain ChatML text of `messages` ({"role", "content"}), without tools and system defaults.

    >>> render([{"role": "user", "content": "hi"}])
    '<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n'
    """
    text = "".join(f"{TURN_START}{turn['role']}\n{turn['content']}{TURN_END}\n" for turn in messages)
    return text + (f"{TURN_START}assistant\n" if add_generation_prompt else "")


def split_thinking(answer: str) -> tuple[str, str]:
    """(thinking, visible answer); an unclosed thinking block is all thinking.

    >>> split_thinking("<think>\\nhm\\n</think>\\n\\n4")
    ('hm', '4')
    """
    opening, closing = THINK
    body = answer.lstrip()
    if not body.startswith(opening):
        return "", answer
    thinking, found, visible = body.removeprefix(opening).partition(closing)
    return thinking.strip(), visible.lstrip("\n") if found else ""
