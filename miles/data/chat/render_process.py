"""The process that executes chat templates: one request a line, one reply a line, each within bounds.

Templates come with models and are trusted with nothing: they run in the sandbox of `transformers`, with bounded memory
and processor time, in a process that holds no secrets and can be killed. It is started as a file and needs nothing of
this package, so that it starts quickly.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import sys
import traceback
from typing import Any

_TEMPLATE_FILE = "<template>"
# Templates that say themselves what an assistant wrote.
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def main() -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    setup = json.loads(requests.readline())
    sys.path[:] = setup["path"]
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _address_space() + setup["memory_bytes"])
    for line in requests:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + setup["processor_time_s"])
        reply = answer(render_jinja_template, json.loads(line), setup)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def answer(render: Any, request: dict[str, Any], setup: dict[str, Any]) -> dict[str, Any]:
    """`{text}`, or `{error, line, clock}`. `render` is the function of `transformers`.

    A request with `answered` asks for the whole conversation, and for `answers`: where in the text assistants wrote.
    """
    tools = request["tools"]
    template = setup["with_tools"] if tools is not None and setup["with_tools"] is not None else setup["template"]
    # The clock would give a resumed run other prompts: calling this text fails, and the failure is explained.
    variables = {"strftime_now": "", **setup["variables"]}

    def rendered(messages: list[Any], **options: bool) -> tuple[str, Any]:
        [text], answers = render(conversations=[messages], tools=tools, chat_template=template, **options, **variables)
        return text, answers

    answers: list[list[int]] = []
    try:
        if not request.get("answered"):
            text, _ = rendered(request["messages"], add_generation_prompt=True)
        elif _GENERATION.search(template):
            text, [answers] = rendered(request["messages"], return_assistant_tokens_mask=True)
        else:
            text, answers = _between_prefixes(rendered, request["messages"])
    except BaseException as error:  # whatever a template does, the reply is one line
        clock = isinstance(error, TypeError) and "strftime_now" in template and "not callable" in str(error)
        reason = "it reads the clock" if clock else f"{type(error).__name__}: {error}"
        return {"error": reason[:500], "line": _line(error), "clock": clock}
    if len(text) > setup["max_characters"]:
        return {"error": f"it wrote {len(text)} characters, at most {setup['max_characters']}", "line": None}
    return {"text": text, "answers": answers}


def _between_prefixes(rendered: Any, messages: list[Any]) -> tuple[str, list[list[int]]]:
    """What a template adds for an assistant's message to the prompt before it, where it adds and changes nothing else."""
    text, _ = rendered(messages)
    answers = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, _ = rendered(messages[:index], add_generation_prompt=True)
        after, _ = rendered(messages[: index + 1])
        if not (after.startswith(before) and text.startswith(after)):
            raise ValueError(
                f"it writes messages before or after messages[{index}] otherwise than alone, so the answer's text is not "
                "known; put what an assistant writes between {% generation %} and {% endgeneration %}"
            )
        answers.append([len(before), len(after)])
    return text, answers


def _line(error: BaseException) -> int | None:
    """The template's line: of a syntax error its own, of others that of the innermost frame in the template."""
    syntax = getattr(error, "lineno", None)
    if isinstance(syntax, int):
        return syntax
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == _TEMPLATE_FILE]
    return frames[-1].lineno if frames else None


def _address_space() -> int:
    """Bytes that this process has mapped; a guess where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 4 << 30


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    # Not every system bounds everything; the parent's clock is there as well.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main()
