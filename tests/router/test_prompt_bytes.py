"""The memory that prompts take in the router before their length is checked."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ContextLengthError, InvalidRequestError, OverloadedError
from contract.identity import Role
from protos import inference_pb2 as pb
from router.intake.request import GenerationRequest, tokenize
from router.intake.request_preparer import TokenizerThreads, size_of
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END, model_files, tiny_tokenizer, write_model
from text.chat import Chat
from text.length_bound import LengthBound
from text.templates.chat_template import ChatTemplate

HELLO = Script(tokens=[END])
LONG = "hello " * 1_300_000
MIB = 2**20


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


@contextmanager
def growing_less_than(num_bytes: int) -> Iterator[None]:
    """Fail where this process needs as many bytes more at any time within the block."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = _status("VmRSS")
    yield
    assert _status("VmHWM") - before < num_bytes


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        yield cluster


async def _refused(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = BytesIO(json.dumps(body).encode())
    headers = {"Content-Type": "application/json"}
    async with cluster.session.post(cluster.url(path), data=data, headers=headers) as response:
        assert response.status == 400
        return dict((await response.json())["error"])


BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
    ("/v1/embeddings", {"input": LONG}, "input"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/tokenize", {"prompt": LONG}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "param"), BODIES)
async def test_eight_megabytes_cost_no_more_than_their_copies(
    path: str, body: dict[str, Any], param: str, cluster: Cluster
) -> None:
    """H2, P9: a prompt of 8 MiB is refused before it is tokenized; six at once cost what their bytes cost."""
    with growing_less_than(400 * MIB):
        errors = await asyncio.gather(*(_refused(cluster, path, body) for _ in range(6)))
    for error in errors:
        assert error["code"] == "context_length_exceeded"
        assert error["param"] in (param, "messages")


async def test_grpc_texts_are_bounded_alike(cluster: Cluster) -> None:
    """H2: Generate and Tokenize refuse before they tokenize."""
    async with cluster.channel() as channel:
        stub = cluster.inference(channel)
        with growing_less_than(400 * MIB):
            for call, request in (
                (stub.GenerateOnce, pb.GenerateRequest(text=LONG)),
                (stub.Tokenize, pb.TokenizeRequest(text=LONG)),
            ):
                with pytest.raises(Exception, match="maximum context length"):
                    await call(request)


async def test_the_prompts_of_one_request_are_bounded_together(tmp_path: Path) -> None:
    """H2: prompts that fit one by one do not add up without a limit."""
    model = write_model(tmp_path / "model", model_files(max_position_embeddings=8192))
    async with running_cluster(HELLO, (), model=model) as cluster:
        await cluster.add(Role.AGGREGATED, max_model_len=8192, model_name="model")
        error = await _refused(cluster, "/v1/completions", {"prompt": ["a" * 6000] * 200, "max_tokens": 1})
    assert "1048576 tokens together" in error["message"]


async def test_texts_that_wait_are_bounded_together() -> None:
    """H2: what cannot be tokenized at once waits, up to a number of characters; then the service is full."""
    threads = TokenizerThreads(max_waiting_characters=100_000)
    begun, release = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> str:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        return "done"

    first = asyncio.create_task(threads.run(90_000, hold))
    await begun.wait()
    with pytest.raises(OverloadedError, match="90000 characters"):
        await threads.run(20_000, lambda: "never")
    assert await threads.run(100, lambda: "short") == "short"
    assert await threads.run(5_000, lambda: "beside") == "beside"
    release.set()
    assert await first == "done"
    assert threads.num_waiting == 0
    threads.close()


async def test_a_text_longer_than_what_may_wait_is_not_shut_out() -> None:
    """H2: alone it may always be tokenized."""
    threads = TokenizerThreads(max_waiting_characters=10)
    assert await threads.run(2**20, lambda: 7) == 7
    threads.close()


def test_the_size_of_a_chat_counts_all_its_texts() -> None:
    """H2: calls, parts and documents count as well."""
    messages: Any = [{"role": "user", "content": "x" * 10, "tool_calls": [{"arguments": {"a": ["y" * 20]}}]}]
    size = size_of(Chat(messages=messages, documents=({"text": "z" * 30},)))
    assert size - size_of(Chat(messages=[])) == 4 + 10 + 20 + 30


def test_a_chat_that_cannot_fit_is_not_rendered() -> None:
    """H2: rendering it, and looking for its texts in the prompt, costs more than tokenizing it."""

    def rendered(*_: object, **__: object) -> None:
        raise AssertionError("it was rendered")

    card: Any = SimpleNamespace(
        chat_template=SimpleNamespace(prompt=rendered),
        tokenizer=SimpleNamespace(length_bound=LengthBound(tiny_tokenizer())),
    )
    part = {"type": "text", "text": LONG[: len(LONG) // 2]}
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": LONG}],
        [{"role": "system", "content": [part, part]}, {"role": "user", "content": "a"}],
        [{"role": "user", "content": "hello " * 1_000}] * 1_000,
    ]
    for messages in chats:
        asked = GenerationRequest(request_id="a", prompt=Chat(messages=messages))
        with pytest.raises(ContextLengthError, match="2048 tokens"):
            tokenize(asked, card, 2048)


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
contents = texts | st.lists(texts.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)


@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant"]), "content": contents}
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["", "|trim"]),
)
@pytest.mark.slow
def test_what_counts_before_rendering_is_in_every_prompt(messages: list[dict[str, Any]], trim: str) -> None:
    """H2: no prompt that fits is refused."""
    source = (
        "{% for m in messages %}{{ m.role }}{% if m.content is string %}{{ m.content" + trim + " }}{% else %}"
        "{% for part in m.content %}{{ part.text" + trim + " }}{% endfor %}{% endif %}{% endfor %}"
    )
    chat = Chat(messages=messages)
    try:
        text = ChatTemplate(source, bos_token=None, eos_token=None).render(chat)
    except InvalidRequestError:
        return
    assert chat.num_certain_characters() <= len(text)


@given(st.integers(0, 3000), st.integers(0, 4000), st.integers(0, 3000))
def test_white_space_at_the_ends_does_not_count(before: int, inner: int, after: int) -> None:
    """H2: templates trim it."""
    text = " " * before + "a b" * inner + "\n" * after
    chat = Chat(messages=[{"role": "user", "content": text}])
    assert chat.num_certain_characters() == len(text.strip())
