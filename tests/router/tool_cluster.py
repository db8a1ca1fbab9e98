"""A router whose model can call tools and reason, in front of workers that write a given answer byte by byte."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from contract.identity import Role
from protos import worker_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END, byte_ids, model_files, tiny_tokenizer, write_model

CHAT = "/v1/chat/completions"
LENGTH = 4096
TEMPLATE = (
    "{% if tools %}tools:{% for t in tools %} {{ t.function.name }}{% endfor %};{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls %} {{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% if thinking %}<think>{% endif %}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, NOW]}


@asynccontextmanager
async def writing_cluster(
    folder: Path,
    answer: str | list[int],
    *,
    template: str = TEMPLATE,
    special: tuple[str, ...] = (),
    script: dict[str, Any] | Callable[[pb.Task], dict[str, Any]] | None = None,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """Run the cluster. special: added special tokens, with ids from ``first_special()`` on. script: fields of ``Script``."""
    backend = tiny_tokenizer()
    backend.add_special_tokens(list(special))
    config = {"chat_template": template, "eos_token": "<|end|>"}
    files = model_files(max_position_embeddings=LENGTH) | {
        "tokenizer_config.json": json.dumps(config).encode(),
        "tokenizer.json": backend.to_str().encode(),
    }
    model = write_model(folder / "tiny", files)
    tokens = [*(byte_ids(answer.encode()) if isinstance(answer, str) else answer), END]
    more = script if callable(script) else (lambda _: script or {})
    async with running_cluster(
        lambda task: Script(**{"tokens": tokens, **more(task)}), (), model=model, **settings
    ) as cluster:
        for role in (Role.PREFILL, Role.DECODE):
            await cluster.add(role, max_model_len=LENGTH)
        yield cluster


def first_special() -> int:
    """Return the id of the first added special token."""
    return int(tiny_tokenizer().get_vocab_size())


def prompt_of(cluster: Cluster) -> str:
    """Return the text of the last prompt that was sent to a prefill worker."""
    ids = list(cluster.workers["prefill-0"].received.prefills[-1].task.prompt_token_ids)
    return str(tiny_tokenizer().decode(ids, skip_special_tokens=False))


def choices(chunks: list[Any]) -> list[dict[str, Any]]:
    """Return the choices of a stream's chunks, without the last event."""
    *chunks, done = chunks
    assert done == "[DONE]"
    return [choice for chunk in chunks for choice in chunk["choices"]]


def joined(chunks: list[Any]) -> dict[str, Any]:
    """Return the message that a client assembles from a stream, and its finish reason."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    finish_reason = None
    for choice in choices(chunks):
        delta = choice["delta"]
        assert len(delta.keys() - {"reasoning"}) <= 1 or "role" in delta
        for name in ("content", "reasoning_content", "reasoning"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            assert choice["finish_reason"] is None
            if "id" in call:
                assert call["index"] == len(calls)
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                calls.append({**call, "function": dict(call["function"])})
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        assert finish_reason is None
        finish_reason = choice["finish_reason"]
    return {**message, "calls": calls, "finish_reason": finish_reason}
