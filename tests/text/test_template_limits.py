"""Limits of hostile chat templates, and the replacement of their process."""

import gc
import itertools
from typing import Any

import psutil
import pytest

from contract.errors import InvalidRequestError, SettingError
from text.chat import Chat
from text.templates.chat_template import ChatTemplate
from text.templates.process import ProcessRenderer
from text.templates.sandbox import DEFAULT, TemplateLimitError
from text.templates.settings import RenderLimits

LIMITS = RenderLimits(cpu_seconds=0.5, max_memory_bytes=320 * 2**20, max_output_characters=2**22)
DOUBLED = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x | length }}"
SHARED = DOUBLED.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]").replace("{{ ns.x | length }}", "")
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = [
    ENDLESS,
    "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    DOUBLED.replace("START", "'a'").replace("STEP", "ns.x ~ ns.x"),
    DOUBLED.replace("START", "'a'").replace("STEP", "ns.x + ns.x"),
    DOUBLED.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
    SHARED + "{{ ns.x | tojson }}",
    SHARED + "{{ ns.x | string }}",
    "{{ 'a' * 9999999999 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:9999999999}'.format(1) }}",
    "{{ 'a' | center(9999999999) }}",
    "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "{{ [1] | batch(999999999, 0) | list }}",
    "{{ [{'a': 1}] | tojson(indent=999999999) }}",
    "{{ ('a' * 999999) }}" * 6,
    "{% for a in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}",
    "{{ lipsum(9999999) }}",
]


def bounded(sources: Any) -> ProcessRenderer:
    return ProcessRenderer(sources, LIMITS)


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_ends_within_its_limits(source: str) -> None:
    """M8: a hostile template ran for ever, or took gigabytes."""
    with pytest.raises(SettingError, match="320 MiB"):
        ChatTemplate(
            source + "{{ messages[0].content }}", bos_token=None, eos_token=None, make_renderer=bounded
        )


def test_a_request_that_takes_too_much_is_refused_and_the_next_one_is_served() -> None:
    """M8: a template that is hostile to some conversations ends its own process only."""
    bomb = (
        "{% for m in messages %}{{ m.content }}{% if m.content == 'bomb' %}"
        + ENDLESS
        + "{% endif %}{% endfor %}"
    )
    template = ChatTemplate(bomb, bos_token=None, eos_token=None, make_renderer=bounded)

    def render(text: str) -> str:
        return template.render(Chat(messages=[{"role": "user", "content": text}]))

    for _ in range(2):
        assert render("hello") == "hello"
        with pytest.raises(TemplateLimitError, match=r"0\.5 s of CPU time"):
            render("bomb")
    assert render("hello") == "hello"
    template.close()


def test_a_large_conversation_fits_the_default_limits() -> None:
    """M8: limits leave room for what a client may send."""
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        bos_token=None,
        eos_token=None,
        make_renderer=ProcessRenderer,
    )
    text = "Grüße ☃ " * 2**18
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    assert len(template.render(Chat(messages=messages))) > 2 * len(text) - 2
    template.close()


def test_the_process_ends_with_its_renderer() -> None:
    before = set(psutil.Process().children())
    renderer = bounded({DEFAULT: "{{ x }}{{ raise_exception('no') if not x }}"})
    (child,) = set(psutil.Process().children()) - before
    assert renderer.render(DEFAULT, {"x": "é\ud800"}) == "é\ud800"
    with pytest.raises(InvalidRequestError, match="rejects these messages: no"):
        renderer.render(DEFAULT, {"x": None})
    child.kill()
    child.wait()
    assert renderer.render(DEFAULT, {"x": 1}) == "1", "another process renders"
    (child,) = set(psutil.Process().children()) - before
    del renderer
    gc.collect()
    assert not child.is_running()


def test_a_template_that_cannot_be_compiled_is_a_setting_error() -> None:
    with pytest.raises(SettingError, match="cannot be compiled"):
        bounded({DEFAULT: "{% if %}"})


@pytest.mark.parametrize("half", [r"{{ '\ud800' }}", r"{{ '\udfff' ~ 'a' }}"])
def test_half_of_a_surrogate_pair_is_refused_before_it_is_tokenized(half: str) -> None:
    """L8: no tokenizer takes such a text, and every chat was a 500."""
    template = ChatTemplate(
        "{{ messages[0].content }}{% if messages[0].content == 'x' %}" + half + "{% endif %}",
        bos_token=None,
        eos_token=None,
        make_renderer=bounded,
    )
    assert template.render(Chat(messages=[{"role": "user", "content": "y"}])) == "y"
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        template.render(Chat(messages=[{"role": "user", "content": "x"}]))
    template.close()


def test_a_process_that_is_stopped_is_replaced_and_the_conversation_is_rendered() -> None:
    """P4: every chat waited 60 s for it, and the first was refused as too costly."""
    before = set(psutil.Process().children())
    renderer = bounded({DEFAULT: "{{ x }}"})
    for text in ("a", "b" * 2**20):
        (child,) = set(psutil.Process().children()) - before
        child.suspend()
        assert renderer.render(DEFAULT, {"x": text}) == text
        assert not child.is_running()
    renderer.close()


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages[0].content }}"])
def test_a_template_that_is_slow_in_every_form_stops_the_start(template: str) -> None:
    """M8: hundreds of renderings, each within its limit, held the start up for a quarter of an hour."""
    seconds = itertools.count()
    with pytest.raises(SettingError, match="probing it takes more than 60 s"):
        ChatTemplate(template, bos_token=None, eos_token=None, clock=lambda: float(next(seconds)))
    assert next(seconds) == 62


def test_the_process_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs what the model's author wrote; a way out of the sandbox must not find the service's keys."""
    for name in ("KVBATON_API_KEYS", "KVBATON_SECRET", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "ANYTHING"):
        monkeypatch.setenv(name, "hunter2")
    others = {child.pid for child in psutil.Process().children()}
    renderer = ProcessRenderer({"default": "x"})
    try:
        (process,) = (child for child in psutil.Process().children() if child.pid not in others)
        given = process.environ()
        assert renderer.render("default", {}) == "x"
    finally:
        renderer.close()
    assert given.keys() <= {"LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PATH", "TZ"}
