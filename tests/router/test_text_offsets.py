"""``text_offset`` indexes the prompt's text followed by the answer's, for every option, whole or streamed."""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from contract.identity import Role
from protos import worker_pb2 as pb
from router.http.generation.completion_formatter import text_offsets, token_offsets
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.test_tokenizer import sentencepiece_like
from tests.text.tiny_model import BOS, END, byte_ids, tiny_tokenizer, word_id
from text.tokenizer import Tokenizer

TEXT = "/v1/completions"
WORD = word_id(" world")
TOKENIZERS = {"byte level": tiny_tokenizer, "sentencepiece": sentencepiece_like}
TEXTS = st.text(alphabet="ab c€é😀▁\n", max_size=12)


def pieces_of(text: str, offsets: list[int]) -> list[str]:
    ends = [*offsets[1:], len(text)]
    return [text[start:end] for start, end in zip(offsets, ends, strict=True)]


def assert_indexes(text: str, tokens: list[str], offsets: list[int]) -> None:
    """Check that each token of whole characters is at its offset, except for a leading space that the text lacks."""
    assert offsets == sorted(offsets)
    assert not offsets or (offsets[0] >= 0 and offsets[-1] <= len(text))
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith(("bytes:", "<|", "<s>", "</s>")):
            assert text.startswith((token, token.removeprefix(" ")), offset), (text, token, offset)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_offsets_of_a_prompt_index_its_text(kind: str, text: str) -> None:
    """F17: a beginning-of-text token and a leading space were counted, though the text has neither."""
    tokenizer = Tokenizer(TOKENIZERS[kind](), {})
    ids = tokenizer.encode(text)
    written = [_written(tokenizer, one) for one in ids]
    assert_indexes(text, written, text_offsets(text, len(ids), tokenizer))
    decoded, offsets = token_offsets(ids, tokenizer)
    assert decoded == tokenizer.decode(ids)
    assert_indexes(decoded, written, offsets)


@given(ids=st.lists(st.integers(0, 250), max_size=20))
def test_token_ids_that_are_no_text_have_offsets_too(ids: list[int]) -> None:
    """F17: half characters, unknown bytes, special tokens in the middle."""
    tokenizer = Tokenizer(tiny_tokenizer(), {})
    text, offsets = token_offsets(ids, tokenizer)
    assert text == tokenizer.decode(ids)
    assert "".join(pieces_of(text, [0, *offsets])) == text and len(offsets) == len(ids)


def test_a_token_begins_with_the_space_before_it() -> None:
    """F17: the offsets of the library leave it out for some tokenizers."""
    tokenizer = Tokenizer(tiny_tokenizer(), {})
    assert text_offsets("hello world again", 3, tokenizer) == [0, 5, 11]
    assert text_offsets("a€b", 5, tokenizer) == [0, 1, 1, 1, 2]
    assert token_offsets([BOS, word_id("hello"), WORD], tokenizer) == ("hello world", [0, 0, 5])


def _written(tokenizer: Tokenizer, token_id: int) -> str:
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:"


PROMPTS = st.sampled_from(["hello world", "é", [WORD], [BOS, WORD, *byte_ids("€".encode())], ["a", "é b"]])
ANSWERS = st.lists(
    st.sampled_from([word_id("hello"), WORD, *byte_ids("a €".encode()), END - 1, word_id("STOP")]), max_size=8
)


async def _check(cluster: Cluster, body: dict[str, Any]) -> None:
    status, whole = await cluster.post(TEXT, body)
    assert status == 200, whole
    *chunks, _ = await cluster.stream(TEXT, body)
    prompts = body["prompt"] if isinstance(body["prompt"][0], list | str) else [body["prompt"]]
    prompts = [prompts] if isinstance(prompts, str) else prompts
    for choice in whole["choices"]:
        prompt = prompts[choice["index"]]
        if isinstance(prompt, list):
            prompt = Tokenizer(tiny_tokenizer(), {}).decode(prompt)
        text = choice["text"] if body["echo"] else prompt + choice["text"]
        found = choice["logprobs"]
        inside = [offset for offset in found["text_offset"] if offset <= len(text)]
        if "stop" not in body:
            assert inside == found["text_offset"]
        assert_indexes(text, found["tokens"][: len(inside)], inside)
        assert body["echo"] or not inside or inside[0] == len(prompt)
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        for name in ("tokens", "text_offset", "token_logprobs"):
            assert [item for one in mine for item in one["logprobs"][name]] == found[name]


async def test_every_offset_is_one_of_the_text_whole_and_streamed() -> None:
    """F17: offsets indexed a text that was not the one in the answer, and began at 0 without ``echo``."""
    loop = asyncio.get_running_loop()
    answer: list[int] = []

    def script(task: pb.Task) -> Script:
        told = [-1.0] * (len(task.prompt_token_ids) - 1)
        return Script(tokens=[*answer, END], prompt_logprobs=told, tokens_per_step=2)

    async with running_cluster(script, (Role.AGGREGATED,)) as cluster:

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(prompt=PROMPTS, tokens=ANSWERS, echo=st.booleans(), max_tokens=st.integers(1, 9))
        @example(prompt="hello world", tokens=[*byte_ids(b"\xe2" * 4), WORD], echo=True, max_tokens=9)
        def ask(prompt: Any, tokens: list[int], echo: bool, max_tokens: int) -> None:
            answer[:] = tokens
            body = {"prompt": prompt, "echo": echo, "max_tokens": max_tokens, "logprobs": 0}
            asyncio.run_coroutine_threadsafe(_check(cluster, body), loop).result()

        await asyncio.to_thread(ask)


async def test_tokens_of_a_stop_string_lie_behind_the_end_of_the_text() -> None:
    """F17: the tokens of a removed stop string are not in the text."""
    script = Script(tokens=[*byte_ids(b"ab"), word_id("STOP"), END])
    async with running_cluster(script) as cluster:
        body = {"prompt": "x", "logprobs": 0, "stop": "STOP"}
        _, whole = await cluster.post(TEXT, body)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("ab", [1, 2, 3])
