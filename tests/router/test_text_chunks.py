"""An event that is written around its text has the same JSON as one that is encoded whole."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answers.answer import Delta
from router.http.exchange import AnswerOptions
from router.http.generation.chat_formatter import ChatFormatter
from router.http.generation.completion_formatter import CompletionFormatter, PromptView
from router.http.streaming import Event, data_event
from router.tokens.delivery import Token
from tests.text.tiny_model import tiny_tokenizer
from text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer(), {})
VIEW = PromptView([None], 1, is_shown=False, hides_answer=False, has_offsets=False)


def options(**more: Any) -> AnswerOptions:
    return AnswerOptions(request_id='r"1', model="a\\model\n", created=7, **more)


def delta(text: str, index: int = 0) -> Delta:
    return Delta(index=index, text=text, tokens=[Token(0, 9)])


def content_of(chunk: Event) -> Any:
    event = chunk if isinstance(chunk, bytes) else data_event(chunk)
    assert event.startswith(b"data: ") and event.endswith(b"\n\n")
    return msgspec.json.decode(event.removeprefix(b"data: "))


@given(st.lists(st.text(min_size=1), min_size=1), st.booleans())
def test_the_chunks_of_a_completion(texts: list[str], include_usage: bool) -> None:
    formatter = CompletionFormatter(options(include_usage=include_usage), TOKENIZER, VIEW)
    for text in texts:
        (chunk,) = formatter.chunks(delta(text, index=3))
        choice = {"index": 3, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
        expected = {"id": 'r"1', "object": "text_completion", "created": 7, "model": "a\\model\n"}
        expected |= {"choices": [choice], **({"usage": None} if include_usage else {})}
        assert content_of(chunk) == expected


@given(st.lists(st.text(min_size=1), min_size=2))
def test_the_chunks_of_a_chat(texts: list[str]) -> None:
    formatter = ChatFormatter(options(), TOKENIZER)
    first, *others = texts
    role, begun = formatter.chunks(delta(first))
    assert content_of(role)["choices"][0]["delta"]["role"] == "assistant"
    expected = content_of(begun)
    for text in others:
        (chunk,) = formatter.chunks(delta(text))
        expected["choices"][0]["delta"] = {"content": text}
        assert content_of(chunk) == expected


@pytest.mark.parametrize("more", [{"logprobs": True}, {"return_token_ids": True}])
def test_chunks_with_the_details_of_tokens_are_encoded_whole(more: dict[str, Any]) -> None:
    for formatter in (
        CompletionFormatter(options(**more), TOKENIZER, VIEW),
        ChatFormatter(options(**more), TOKENIZER),
    ):
        for text in ("a", "b"):
            *_, chunk = formatter.chunks(delta(text))
            assert isinstance(chunk, dict)
