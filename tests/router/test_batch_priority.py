"""Requests of batches have the lowest priority, take no place in the queue, and are shared out between keys."""

import asyncio
from pathlib import Path

import pytest

from contract.errors import OverloadedError
from contract.identity import Role
from protos import worker_pb2 as pb
from protos.worker_pb2 import Credit
from router.batches.gate import LineGate
from tests.fakes.router.script import Script
from tests.fakes.router.worker import ScriptedWorker
from tests.router.batch_cluster import (
    ABC,
    STUCK,
    TEXT,
    batch_over,
    batch_when,
    create,
    filing_cluster,
    jsonl,
    key,
    lines_of,
    request_line,
)
from tests.router.test_admission_queue import grant_one
from tests.text.tiny_model import byte_ids


def lines(*letters: str) -> bytes:
    return jsonl(*(request_line(letter, prompt=letter) for letter in letters))


def finish(worker: ScriptedWorker, place: int) -> None:
    """Send the rest of an answer that is stuck after its first token."""
    task = worker.received.decodes[place].task
    worker.stream.send(
        pb.TokenEntry(
            request_id=task.request_id,
            attempt=task.attempt,
            first_index=1,
            token_ids=ABC.tokens[1:],
            finish_reason="stop",
        )
    )


async def test_a_request_is_placed_before_lines_that_wait_and_they_take_no_place_in_the_queue(
    tmp_path: Path,
) -> None:
    async with filing_cluster(tmp_path, STUCK, max_queue=1, batches_max_concurrency=3) as cluster:
        worker = cluster.workers["both-0"]
        await grant_one(cluster, "both-0")
        made = await create(cluster, lines("a", "b", "c", "d", "e"))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        await cluster.until(lambda state: state["num_in_line"] == 2)
        first = asyncio.create_task(cluster.post(TEXT, {"prompt": "1"}))
        await worker.received.wait_for(lambda worker: len(worker.decodes) == 2)
        second = asyncio.create_task(cluster.post(TEXT, {"prompt": "2"}))
        await cluster.until(lambda state: state["num_in_line"] == 3)
        status, answer = await cluster.post(TEXT, {"prompt": "3"})
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        cluster.script = lambda _: ABC
        finish(worker, 1)
        assert [(await one)[0] for one in (first, second)] == [200, 200]
        batch = await batch_over(cluster, made["id"])
        assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
        order = [call.task.prompt_token_ids[0] for call in worker.received.decodes]
        assert order[:3] == byte_ids(b"a12")
        assert sorted(order[3:]) == byte_ids(b"abcde")
        priorities = {call.task.prompt_token_ids[0]: call.task.priority for call in worker.received.decodes}
        assert [priorities.pop(token) for token in byte_ids(b"12")] == [0, 0]
        assert set(priorities.values()) == {-(2**31)}


async def test_a_running_line_is_preempted_by_a_waiting_request_and_begins_again(tmp_path: Path) -> None:
    """The worker has room for two: one line is stopped for one request, and the other one continues."""
    async with filing_cluster(tmp_path, STUCK) as cluster:
        worker = cluster.workers["both-0"]
        worker.stream.grant(Credit(max_requests=2, max_tokens=1000))
        await cluster.until(lambda state: state["workers"][0]["max_requests"] == 2)
        made = await create(cluster, lines("a", "b"))
        await cluster.until(lambda state: state["requests"]["streaming"] == 2)
        cluster.script = lambda _: ABC
        assert (await cluster.post(TEXT, {"prompt": "i"}))[0] == 200
        await worker.received.wait_for(lambda worker: len(worker.decodes) == 4)
        assert [call.task.prompt_token_ids[0] for call in worker.received.decodes] == byte_ids(b"abib")
        finish(worker, 0)
        batch = await batch_over(cluster, made["id"])
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        found = await lines_of(cluster, batch["output_file_id"])
        assert {line["response"]["body"]["choices"][0]["text"] for line in found} == {"abc"}
        metrics = await cluster.metrics()
        assert metrics['kvbaton_batch_requests_total{result="stopped"}'] == 1


async def test_lines_begin_only_while_nobody_waits(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, STUCK) as cluster:
        await grant_one(cluster, "both-0")
        first = asyncio.create_task(cluster.post(TEXT, {"prompt": "1"}))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        second = asyncio.create_task(cluster.post(TEXT, {"prompt": "2"}))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        made = await create(cluster, lines("a", "b"))
        state = await cluster.until(lambda state: any(state["batch_requests"].values()))
        assert state["batch_requests"] == {"waiting": 1, "running": 0}, (
            "the next line is read when this one may run"
        )
        assert state["num_in_line"] == 1
        cluster.script = lambda _: ABC
        first.cancel()
        await second
        await batch_over(cluster, made["id"])
        order = [call.task.prompt_token_ids[0] for call in cluster.workers["both-0"].received.decodes]
        assert order == byte_ids(b"12ab")


async def test_a_line_for_which_the_service_is_too_busy_is_retried(tmp_path: Path) -> None:
    busy = 2

    def script(_: pb.Task) -> Script:
        nonlocal busy
        busy -= 1
        return Script(refuse=OverloadedError("no room")) if busy >= 0 else ABC

    async with filing_cluster(tmp_path, script, max_replays=0) as cluster:
        batch = await batch_over(cluster, (await create(cluster, lines("a")))["id"])
        [line] = await lines_of(cluster, batch["output_file_id"])
        assert (line["response"]["status_code"], batch["error_file_id"]) == (200, None)
        metrics = await cluster.metrics()
        assert metrics['kvbaton_batch_requests_total{result="retried"}'] == 2


async def test_a_batch_waits_for_workers(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, roles=()) as cluster:
        made = await create(cluster, lines("a"))
        async with asyncio.timeout(20):
            while "kvbaton_batch_requests_total" not in str(await cluster.metrics()):
                await asyncio.sleep(0.01)
        await cluster.add(Role.AGGREGATED)
        batch = await batch_over(cluster, made["id"])
    assert batch["request_counts"]["completed"] == 1


async def test_keys_take_turns_and_requests_carry_their_owner(tmp_path: Path) -> None:
    """The second key, with few lines, does not wait for all lines of the first one."""
    async with filing_cluster(tmp_path, STUCK, api_keys="a,b", batches_max_concurrency=2) as cluster:
        worker = cluster.workers["both-0"]
        many = await create(cluster, lines("a", "b", "c", "d"), headers=key("a"))
        await cluster.until(lambda state: state["requests"]["streaming"] == 2)
        few = await create(cluster, lines("x"), headers=key("b"))
        await batch_when(cluster, few["id"], lambda batch: batch["status"] == "in_progress", key("b"))
        await cluster.until(lambda state: state["batch_requests"]["waiting"] == 2)  # a line of each key
        cluster.script = lambda _: ABC
        finish(worker, 0)
        assert (await batch_over(cluster, few["id"], key("b")))["status"] == "completed"
        finish(worker, 1)
        assert (await batch_over(cluster, many["id"], key("a")))["status"] == "completed"
        order = [call.task.prompt_token_ids[0] for call in worker.received.decodes]
        assert order[:3] == byte_ids(b"abx")
        assert sorted(order[3:]) == byte_ids(b"cd")


async def test_the_gate_grants_permits_to_the_owner_with_the_fewest() -> None:
    gate, order = LineGate(2, lambda: True), []
    ends = {name: asyncio.Event() for name in ("a1", "a2", "a3", "a4", "b1", "b2")}

    async def line(name: str) -> None:
        place = await gate.acquire(name[0])
        order.append(name)
        await ends[name].wait()
        gate.release(place)

    async with asyncio.TaskGroup() as group:
        for name in ends:
            group.create_task(line(name))
        for name in ("a1", "a2", "b1", "a3", "b2", "a4"):
            while name not in order:
                await asyncio.sleep(0)
            ends[name].set()
    assert order == ["a1", "a2", "b1", "a3", "b2", "a4"]


@pytest.mark.parametrize("cancel_at", range(4))
async def test_a_permit_is_not_lost_by_a_cancel(cancel_at: int) -> None:
    is_idle = cancel_at != 0
    gate = LineGate(1, lambda: is_idle)
    tasks = [asyncio.create_task(gate.acquire("a")) for _ in range(2)]
    for _ in range(cancel_at - 1):
        await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    if not tasks[0].cancelled():
        gate.release(tasks[0].result())
        gate.release(tasks[0].result())  # a second time changes nothing
    is_idle = True
    gate.admit()
    async with asyncio.timeout(5):
        await tasks[1]


async def test_the_newest_lines_are_preempted_and_permits_stay_balanced() -> None:
    gate, runs = LineGate(4, lambda: True), list[str]()
    ends = asyncio.Event()

    async def line(name: str) -> None:
        place = await gate.acquire(name)

        async def work() -> None:
            runs.append(name)
            place.has_begun = name in "abc"
            await ends.wait()

        await gate.run(place, work)
        gate.release(place)

    async def ran(expected: str) -> None:
        async with asyncio.timeout(5):
            while "".join(runs) != expected:
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for name in "abcde":
            group.create_task(line(name))
        await ran("abcd")
        gate.preempt(1)
        gate.preempt(1)  # for the same request: one is stopping already
        await ran("abcde")
        gate.preempt(3)  # a and b have tokens, then the oldest without
        await ran("abcdecba")
        ends.set()
