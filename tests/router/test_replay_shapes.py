"""A decode worker's death in mid-stream, in each shape of an answer: the events continue unchanged (law 5)."""

import re
from pathlib import Path
from typing import Any

import pytest

from contract.identity import Role
from protos import worker_pb2 as pb
from tests.router.cluster import Cluster
from tests.router.test_ends import nothing_is_left
from tests.router.test_responses import ALL, NOW, PARSERS, WEATHER, events_of, without_ids
from tests.router.tool_cluster import ASK as ASK_CHAT
from tests.router.tool_cluster import CHAT, LENGTH, joined, writing_cluster
from tests.text.tiny_model import END, byte_ids

ASK: dict[str, Any] = {"input": "hi", "tools": [WEATHER, NOW]}
BYTES = ALL.encode()
PLACES = {
    "behind token 0": 1,
    "inside the opening tag": BYTES.index(b"<think>") + 3,
    "in the reasoning": BYTES.index(b"Hm") + 1,
    "inside a character of the reasoning": BYTES.index("界".encode()) + 1,
    "inside the closing tag": BYTES.index(b"</think>") + 4,
    "in the text": BYTES.index(b"look"),
    "inside a call's opening": BYTES.index(b"<tool_call>") + 5,
    "in a call's name": BYTES.index(b"weather") + 2,
    "in a call's arguments": BYTES.index(b"Paris") + 2,
    "between two calls": BYTES.index(b"</tool_call>\n<") + len("</tool_call>\n"),
    "in the text behind the calls": BYTES.index(b"Done") + 2,
    "before the last token": len(BYTES),
}


async def replays(cluster: Cluster) -> float:
    return (await cluster.metrics()).get('kvbaton_request_replays_total{kind="worker_lost"}', 0)


def without_numbers(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reduce a stream to what two streams of one answer share: pieces are joined, ids are numbered in order."""
    names: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    for event in events:
        plain = {name: value for name, value in event.items() if name not in ("sequence_number", "logprobs")}
        last = found[-1] if found else {}
        if "delta" in plain and {**last, "delta": ""} == {**_named(plain, names), "delta": ""}:
            last["delta"] += plain["delta"]
        else:
            found.append(_named(plain, names))
    return found


def _named(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            name: 0 if name.endswith("_at") and inner else _named(inner, names)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_named(inner, names) for inner in value]
    if isinstance(value, str) and re.fullmatch(r"(resp|msg|rs|fc|call)_?[0-9a-zA-Z-]{16,}", value):
        return names.setdefault(value, f"id {len(names)}")
    return value


@pytest.mark.parametrize("place", PLACES)
async def test_a_responses_events_do_not_break(place: str, tmp_path: Path) -> None:
    """``events_of`` asserts that ``sequence_number`` has no gap and no repetition."""
    die_at = PLACES[place]
    is_dying = False

    def script(task: pb.Task) -> dict[str, Any]:
        return {"die_at": die_at} if is_dying and task.attempt == 0 else {}

    async with writing_cluster(tmp_path, ALL, script=script, **PARSERS) as cluster:
        quiet = await events_of(cluster, ASK)
        await cluster.add(Role.DECODE, "decode-1", max_model_len=LENGTH)
        is_dying = True
        events = await events_of(cluster, ASK)
        assert await replays(cluster) == 1
        await nothing_is_left(cluster)
    assert not {"error", "response.failed"} & {event["type"] for event in events}
    assert without_numbers(events) == without_numbers(quiet)
    assert without_ids(events[-1]["response"]) == without_ids(quiet[-1]["response"])
    assert len({item["id"] for item in events[-1]["response"]["output"]}) == 5


@pytest.mark.parametrize("die_at", [1, 20, 70, 120])
async def test_each_of_two_chats_goes_on_by_itself(die_at: int, tmp_path: Path) -> None:
    """Their worker dies when the second is at ``die_at``; neither loses, repeats or mixes up anything."""
    answers = [ALL, ALL.replace("Hm", "Well").replace("Paris", "Rome, 世界").replace("Done", "So")]
    body = {**ASK_CHAT, "n": 2}
    is_dying = False

    def script(task: pb.Task) -> dict[str, Any]:
        is_bad = is_dying and task.attempt == 0 and task.choice == 1
        tokens = [*byte_ids(answers[task.choice].encode()), END]
        return {"tokens": tokens, "die_at": die_at if is_bad else None}

    async with writing_cluster(tmp_path, ALL, script=script, **PARSERS) as cluster:
        quiet = await cluster.stream(CHAT, body)
        await cluster.add(Role.DECODE, "decode-1", max_model_len=LENGTH)
        is_dying = True
        chunks = await cluster.stream(CHAT, body)
        assert await replays(cluster) >= 1
        await nothing_is_left(cluster)
    assert not any("error" in chunk for chunk in chunks[:-1])
    messages = [message_of(chunks, index) for index in (0, 1)]
    assert messages == [message_of(quiet, index) for index in (0, 1)]
    assert [message["reasoning"] for message in messages] == ["Hm, 世界.", "Well, 世界."]
    assert "Rome, 世界" in messages[1]["calls"][0]["function"]["arguments"]


def message_of(chunks: list[Any], index: int) -> dict[str, Any]:
    """Join the chunks of one choice as a client does, without the ids of calls."""
    own = [{"choices": [c for c in chunk["choices"] if c["index"] == index]} for chunk in chunks[:-1]]
    message = joined([*own, chunks[-1]])
    assert sum("role" in choice["delta"] for chunk in own for choice in chunk["choices"]) == 1
    assert len({call.pop("id") for call in message["calls"]}) == 2
    return message
