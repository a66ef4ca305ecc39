"""A template is trusted with nothing: what it does wrong is told with its line, and its process never outlives it."""

from __future__ import annotations

import gc

import psutil
import pytest

from miles.config import ConfigError
from miles.data.chat import ChatRenderer, ChatTemplate, Conversation, read_template, renderer
from miles.data.chat.template import MAX_BYTES

HELLO = Conversation.of([{"role": "user", "content": "hello"}], place="p:1")


def rendered(source: str, **limits: int) -> str:
    with ChatRenderer(ChatTemplate(source, "t.jinja"), **limits) as open_renderer:
        return open_renderer.render(HELLO, place="p:1")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a\n{% for m in messages %}", "line 2: TemplateSyntaxError: Unexpected end of template"),
        ("a\nb\n{{ nothing.at.all }}", "line 3: UndefinedError: 'nothing' is undefined"),
        ("a\n{{ raise_exception('no ' + messages[0].role) }}", "line 2: TemplateError: no user"),
        ("{{ ''.__class__.__mro__ }}", "line 1: SecurityError: access to attribute '__class__'"),
        ("{{ messages[0].__init__.__globals__ }}", "line 1: SecurityError: "),
        ("{% include '/etc/passwd' %}", "line 1: TypeError: no loader"),
        ("{{ range(999999999) }}", "line 1: OverflowError: Range too big"),
        ("{{ strftime_now('%Y') }}", "line 1: it reads the clock; a resumed run would have other prompts; give the date"),
    ],
)  # fmt: skip
def test_a_template_that_fails_is_told_with_its_line(source, said):
    with pytest.raises(ConfigError) as raised:
        rendered(source)
    text = str(raised.value)
    assert text.startswith("p:1: t.jinja: ")
    assert said in text
    assert "\n" not in text


def test_a_template_without_end_or_bounds_is_stopped():
    forever = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(
        ConfigError, match=r"p:1: t\.jinja: more than 1 s of processor time for one prompt; mend the templ"
    ):
        rendered(forever, processor_time_s=1)
    with pytest.raises(ConfigError, match=r"p:1: t\.jinja: .*MemoryError"):
        rendered("{{ ('x' * 999999999) | length }}", memory_bytes=200 << 20)
    with pytest.raises(ConfigError, match=r"p:1: t\.jinja: it wrote 20000000 characters, at most 8388608"):
        rendered("{{ 'x' * 20000000 }}")


def test_a_process_that_answers_too_late_is_ended(monkeypatch):
    monkeypatch.setattr(renderer, "WALL_TIME_S", 0.05)
    with pytest.raises(ConfigError, match=r"p:1: t\.jinja: no prompt within 0\.05 s; mend the template"):
        rendered("hello")


def test_the_next_prompt_is_rendered_after_one_that_failed():
    with ChatRenderer(ChatTemplate("{{ messages[0].content + messages[0].name }}", "t.jinja")) as open_renderer:
        with pytest.raises(ConfigError, match="has no attribute 'name'"):
            open_renderer.render(HELLO, place="p:1")
        named = Conversation.of([{"role": "user", "content": "a", "name": "b"}], place="p:2")
        assert open_renderer.render(named, place="p:2") == "ab"


def test_nothing_is_left_of_the_process():
    open_renderer = ChatRenderer(ChatTemplate("x", "t.jinja"))
    before = {process.pid for process in psutil.Process().children()}
    open_renderer.render(HELLO, place="p:1")
    (made,) = [process for process in psutil.Process().children() if process.pid not in before]
    open_renderer.close()
    assert not made.is_running()
    open_renderer.close()
    gc.collect()


def test_the_environment_of_the_run_is_not_the_template_s(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    open_renderer = ChatRenderer(ChatTemplate("x", "t.jinja"))
    with open_renderer:
        open_renderer.render(HELLO, place="p:1")
        environment = psutil.Process(open_renderer._process.pid).environ()
    assert "SECRET_OF_THE_RUN" not in environment


def test_a_template_file_is_checked_where_it_is_read(tmp_path):
    def said(file):
        with pytest.raises(ConfigError) as raised:
            read_template(tmp_path, file=file, arguments={})
        return str(raised.value)

    assert "none.jinja: No such file or directory; a relative path begins at" in said(tmp_path / "none.jinja")
    (tmp_path / "big.jinja").write_text("x" * (MAX_BYTES + 1))
    assert "big.jinja is above 1 MiB" in said(tmp_path / "big.jinja")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    assert "latin.jinja is no UTF-8 text" in said(tmp_path / "latin.jinja")
    assert "chat_template is missing, and the data holds messages; set data.chat_template to a Jinja file" in said(None)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "rag", "template": "x"}]}')
    assert "chat_template has no default template that is text" in said(None)
    (tmp_path / "tokenizer_config.json").write_text("[")
    assert "tokenizer_config.json" in said(None)
