"""Qwen3 chat format: ChatML turns, a thinking block in the answer, tool calls as JSON inside tags.

`FORMAT` is for models that are made here; a checkpoint's own `chat_template` is what renders its prompts.
"""

from __future__ import annotations

from miles.data.chat import ChatFormat

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
THINK = ("<think>", "</think>")
TOOL_CALL = ("<tool_call>", "</tool_call>")

# Own words, the format's marks: tools are listed in the system turn, results of tools come in a user turn, and
# `enable_thinking: false` begins the answer behind an empty thinking block.
_TEMPLATE = """\
{%- set start = '<|im_start|>' %}
{%- set end = '<|im_end|>\\n' %}
{%- set opening = messages[0] if messages[0].role in ('system', 'developer') else none %}
{%- if opening or tools %}
    {{- start + 'system\\n' }}
    {%- if opening %}
        {{- opening.content }}
    {%- endif %}
    {%- if tools %}
        {{- '\\n\\n' if opening else '' }}
        {{- 'Functions you may call, one JSON schema a line:\\n<tools>\\n' }}
        {%- for tool in tools %}
            {{- (tool | tojson) + '\\n' }}
        {%- endfor %}
        {{- '</tools>\\nTo call one, write {"name": ..., "arguments": {...}} between <tool_call> and </tool_call>.' }}
    {%- endif %}
    {{- end }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- start + 'user\\n' + message.content + end }}
    {%- elif message.role == 'assistant' %}
        {{- start + 'assistant\\n' }}
        {%- generation %}
        {%- if message.content %}
            {{- message.content.split('</think>')[-1].lstrip('\\n') }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set called = call.function or call %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": ' + (called.name | tojson) + ', "arguments": ' }}
            {{- called.arguments if called.arguments is string else called.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- end }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}
            {{- start + 'user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- end }}
        {%- endif %}
    {%- elif not loop.first %}
        {{- raise_exception('a ' + message.role + ' message comes first or not at all') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- start + 'assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

FORMAT = ChatFormat(template=_TEMPLATE, turn_end=TURN_END, special=(TURN_START,))


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
