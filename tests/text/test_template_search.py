"""Texts of a conversation are searched in a prompt within bounds."""

import pytest

from text.chat import Chat
from text.templates.chat_template import ChatTemplate
from text.templates.sandbox import TemplateLimitError
from text.templates.search import Search

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
