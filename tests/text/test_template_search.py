"""Texts of a conversation are searched in a prompt within bounds."""

import pytest

from contract.errors import InvalidRequestError
from text.chat import Chat
from text.templates.attempt import Search
from text.templates.chat_template import ChatTemplate
from text.templates.sandbox import TemplateLimitError

READS_BEGINNING = (
    "{% if messages[0].content.startswith('A') %}!{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}{% endfor %}"
)


def test_texts_are_found_in_their_order_and_anywhere() -> None:
    search = Search("one two 'three' four")
    assert search.has(["two"]) and search.has(["three", "'three'"]) and search.has(["four"])
    assert search.has(["one"]) and search.has(["missing", " two "])
    assert not search.has(["five", "six"])


def test_many_escaped_texts_are_found_without_going_through_the_prompt_for_each() -> None:
    """H6: 4,000 escaped texts took 18 s, each searched in all of 8 MB in every spelling."""
    texts = [f'{number:05d} "quoted"\n' * 20 for number in range(4000)]
    messages = [{"role": "user", "content": "A"}, *({"role": "user", "content": text} for text in texts)]
    template = ChatTemplate(READS_BEGINNING, bos_token=None, eos_token=None)
    assert template.prompt(Chat(messages=messages)).texts is None


def test_a_search_that_goes_through_too_much_ends() -> None:
    prompt = "".join(f"{number:06d}" for number in reversed(range(100_000)))
    search = Search(prompt)
    with pytest.raises(TemplateLimitError, match="too long to check"):
        for number in range(100_000):
            search.has([f"{number:06d}"])


USER = {"role": "user", "content": "What is the weather?"}
SUNNY = {"role": "assistant", "content": "Sunny."}
HEAD, TAIL = "{% for m in messages", "<{{ m.role }}>{{ m.content }}"


@pytest.mark.parametrize(
    ("template", "messages", "lost"),
    [
        (HEAD + " | unique(attribute='content') %}" + TAIL + "{% endfor %}", [USER, SUNNY, USER], 2),
        (
            HEAD + " %}{% if loop.previtem is undefined or loop.previtem.content != m.content %}" + TAIL
            + "{% endif %}{% endfor %}",
            [SUNNY, USER, USER],
            2,
        ),
        (
            HEAD + " if m.content != 'A' %}" + TAIL + "{% endfor %} AAA",
            [USER, SUNNY, {"role": "user", "content": "A"}],
            2,
        ),
        (
            HEAD + " if m.content not in ('hi', 'ok') %}" + TAIL + "{% endfor %} think",
            [{"role": "user", "content": "hi"}, SUNNY, USER],
            0,
        ),
    ],
)  # fmt: skip
def test_a_text_that_is_lost_is_not_taken_for_another_that_is_like_it(
    template: str, messages: list[dict[str, str]], lost: int
) -> None:
    """F4: a template that compares whole texts drops one only if it has no marks; then it was found elsewhere."""
    with pytest.raises(InvalidRequestError, match="does not show") as caught:
        ChatTemplate(template, bos_token=None, eos_token=None).prompt(Chat(messages=messages))
    assert caught.value.param == f"messages[{lost}].content"


def test_short_texts_are_whole_though_the_markup_differs() -> None:
    """The markup of the marked prompt has words that hold a message's text."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if not messages[-1].content.startswith('<tool>') %}<think></think>"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "n"},
        {"role": "user", "content": "<tool>hi</tool>"},
    ]
    prompt = ChatTemplate(template, bos_token=None, eos_token=None).render(Chat(messages=messages))
    assert prompt == "<user>hi<assistant>n<user><tool>hi</tool>"
