"""A worker's death or a failed hand-over does not end a request: it continues on other workers (law 5)."""

import asyncio
from typing import Any

import pytest

from contract.errors import IncompatiblePeerError, InternalError, KvbatonError, OverloadedError, TransferError
from contract.identity import Role
from protos import worker_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_ends import TEXT, TOKENS, nothing_is_left

ANSWER = "abcdef"
TWO_EACH = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)


def at_first(**trouble: Any) -> Any:
    """Return a script whose first attempt fails, and no later one."""
    return lambda task: Script(tokens=TOKENS, **({} if task.attempt else trouble))


def on_leg(role: Role, **trouble: Any) -> Any:
    """Return a script of which only the first attempt's prefill leg (first index 0) or decode leg fails."""

    def script(task: pb.Task) -> Script:
        is_prefill = task.first_index == 0
        is_bad = task.attempt == 0 and is_prefill == (role is Role.PREFILL)
        return Script(tokens=TOKENS, **(trouble if is_bad else {}))

    return script


async def add_twins(cluster: Cluster, *roles: Role) -> None:
    for role in roles:
        await cluster.add(role, f"{role.value}-1")


async def texts(cluster: Cluster, **fields: Any) -> list[str]:
    """One streamed completion: its chunks' texts, without an error."""
    async with asyncio.timeout(30):
        events = await cluster.stream(TEXT, {"prompt": "x", **fields})
    assert events[-1] == "[DONE]"
    assert not any("error" in event for event in events[:-1])
    return [event["choices"][0]["text"] for event in events[:-1]]


@pytest.mark.parametrize("die_at", range(7))
async def test_the_answer_goes_on_when_its_worker_dies(die_at: int) -> None:
    """Index 0 is the prefill worker's, all others are the decode worker's; nothing is lost and nothing comes twice."""
    async with running_cluster(at_first(die_at=die_at)) as cluster:
        await add_twins(cluster, *PAIR)
        assert "".join(await texts(cluster)) == ANSWER
        await nothing_is_left(cluster)
        metrics = await cluster.metrics()
        assert metrics['kvbaton_request_replays_total{kind="worker_lost"}'] == 1
        assert 'kvbaton_request_errors_total{kind="worker_lost"}' not in metrics
        tasks = [call.task for worker in cluster.workers.values() for call in worker.received.decodes]
        replay = next(task for task in tasks if task.attempt == 1)
        prompt = len(next(task for task in tasks if task.attempt == 0).prompt_token_ids)
        delivered = list(replay.prompt_token_ids[prompt:])
        assert delivered == TOKENS[: len(delivered)]
        assert replay.first_index == len(delivered) + 1


async def test_a_prefill_workers_death_after_the_first_token_costs_no_token() -> None:
    """The KV had not arrived yet: both legs begin again after the first token."""
    stall = on_leg(Role.DECODE, stall_at=1)
    async with running_cluster(stall) as cluster:
        await add_twins(cluster, Role.PREFILL)
        asking = asyncio.create_task(texts(cluster))
        await cluster.until(lambda state: state["requests"]["streaming"])
        first = next(worker for worker in cluster.workers.values() if worker.received.prefills)
        await first.die()
        assert "".join(await asking) == ANSWER
        await nothing_is_left(cluster)


@pytest.mark.parametrize("replays", [1, 4])
async def test_a_stream_survives_several_deaths(replays: int) -> None:
    script = lambda task: Script(tokens=TOKENS, die_at=task.attempt + 1 if task.attempt < replays else None)  # noqa: E731
    async with running_cluster(script, (Role.AGGREGATED,), max_worker_deaths=5) as cluster:
        for number in range(1, replays + 1):
            await cluster.add(Role.AGGREGATED, f"both-{number}")
        assert "".join(await texts(cluster)) == ANSWER
        assert (await cluster.metrics())['kvbaton_request_replays_total{kind="worker_lost"}'] == replays


@pytest.mark.parametrize(
    "error", [TransferError("torn"), IncompatiblePeerError("other layout"), OverloadedError("no room")]
)
@pytest.mark.parametrize("role", PAIR)
async def test_trouble_that_other_workers_may_not_have_is_replayed(role: Role, error: KvbatonError) -> None:
    index = 0 if role is Role.PREFILL else 1
    async with running_cluster(on_leg(role, fail_at=index, error=error)) as cluster:
        await add_twins(cluster, *PAIR)
        assert "".join(await texts(cluster)) == ANSWER
        assert (await cluster.metrics())[f'kvbaton_request_replays_total{{kind="{error.kind}"}}'] == 1
        await nothing_is_left(cluster)


async def test_a_leg_that_is_refused_is_sent_elsewhere() -> None:
    async with running_cluster(on_leg(Role.DECODE, refuse=OverloadedError("no room"))) as cluster:
        await add_twins(cluster, *PAIR)
        assert "".join(await texts(cluster)) == ANSWER
        decodes = [name for name, worker in cluster.workers.items() for _ in worker.received.decodes]
        assert sorted(decodes) == ["decode-0", "decode-1"]


async def test_only_the_worker_that_rejects_a_leg_is_avoided() -> None:
    """The prefill worker has done its part; its cache serves the next attempt too."""
    async with running_cluster(on_leg(Role.DECODE, refuse=OverloadedError("no room"))) as cluster:
        await add_twins(cluster, *PAIR)
        assert "".join(await texts(cluster)) == ANSWER
        prefills = [name for name, worker in cluster.workers.items() for _ in worker.received.prefills]
        assert len(prefills) == 2 and len(set(prefills)) == 1


async def test_a_bug_is_not_replayed() -> None:
    async with running_cluster(at_first(fail_at=1, error=InternalError("a bug"))) as cluster:
        await add_twins(cluster, *PAIR)
        status, answer = await cluster.post(TEXT, {"prompt": "x"})
        assert status == 500, answer
        assert answer["error"]["code"] == "internal"


async def test_without_prefill_worker_a_replay_is_computed_where_it_is_decoded() -> None:
    async with running_cluster(on_leg(Role.PREFILL, die_at=0)) as cluster:
        assert "".join(await texts(cluster)) == ANSWER
        replay = cluster.workers["decode-0"].received.decodes[1]
        assert not replay.HasField("source")
        assert (replay.task.attempt, replay.task.first_index) == (1, 0)
        assert (await cluster.metrics())["kvbaton_request_local_recomputes_total"] == 1


async def test_two_failed_hand_overs_in_a_row_are_enough() -> None:
    """The third attempt moves no KV."""

    def script(task: pb.Task) -> Script:
        return Script(tokens=TOKENS, fail_at=1 if task.attempt < 2 else None, error=TransferError("torn"))

    async with running_cluster(script) as cluster:
        assert "".join(await texts(cluster)) == ANSWER
        last = cluster.workers["decode-0"].received.decodes[-1]
        assert (last.task.attempt, last.HasField("source")) == (2, False)
        assert len(cluster.workers["prefill-0"].received.prefills) == 2


async def test_too_many_failures_without_a_token_are_one_clear_error() -> None:
    """The sixth attempt would succeed, but the client has received an error before."""
    bad, good = Script(tokens=TOKENS, fail_at=2, error=OverloadedError("no room")), Script(tokens=TOKENS)
    script = lambda task: bad if task.attempt < 5 else good  # noqa: E731
    async with running_cluster(script, (Role.AGGREGATED,), max_replays=3) as cluster:
        status, answer = await cluster.post(TEXT, {"prompt": "x"})
        assert status == 429, answer
        assert answer["error"]["message"] == "no room"
        assert [call.task.attempt for call in cluster.workers["both-0"].received.decodes] == [0, 1, 2, 3]
        await nothing_is_left(cluster)


async def test_a_replay_waits_for_a_worker_that_starts_again() -> None:
    async with running_cluster(at_first(die_at=3), worker_wait_seconds=30) as cluster:
        asking = asyncio.create_task(texts(cluster))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        await cluster.add(Role.DECODE, "decode-0")
        assert "".join(await asking) == ANSWER


async def test_the_client_gets_the_first_error_if_no_other_worker_attaches() -> None:
    async with running_cluster(at_first(die_at=3), worker_wait_seconds=0.1) as cluster:
        status, answer = await cluster.post(TEXT, {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "worker_lost")
        assert "a worker was lost" in answer["error"]["message"]
        assert "no decode worker is attached" in answer["error"]["message"]


async def test_tokens_of_a_worker_that_wakes_up_are_dropped() -> None:
    """It was taken for dead and its request continues elsewhere: whatever it sends afterwards is dropped."""
    stall = at_first(stall_at=2)
    async with running_cluster(stall, ()) as cluster:
        old = await cluster.add(Role.AGGREGATED, "both-0", boot_id="one-process")
        await cluster.service.wait_ready()
        asking = asyncio.create_task(texts(cluster))
        await old.received.wait_for(lambda worker: len(worker.decodes) == 1)
        await cluster.until(lambda state: state["requests"]["streaming"])
        task = old.received.decodes[0].task
        other = await cluster.add(Role.AGGREGATED, "both-1")
        again = await cluster.add(Role.AGGREGATED, "both-0", boot_id="one-process")
        late = pb.TokenEntry(
            request_id=task.request_id, attempt=0, first_index=2, token_ids=TOKENS[2:], finish_reason="stop"
        )
        again.stream.send(late)
        other.stream.send(late)
        assert "".join(await asking) == ANSWER
        await cluster.until(
            lambda state: sum(worker["num_stale_entries"] for worker in state["workers"]) == 2
        )


async def test_the_failed_attempt_is_cancelled_where_it_may_still_run() -> None:
    async with running_cluster(at_first(die_at=0, stall_at=1)) as cluster:
        await add_twins(cluster, Role.PREFILL)
        assert "".join(await texts(cluster)) == ANSWER
        await cluster.service.stop()  # which waits for the cancels that are on their way
        assert [cancel.attempt for cancel in cluster.workers["decode-0"].received.cancels] == [0]


async def test_the_deadline_counts_over_all_attempts() -> None:
    script = at_first(die_at=2)
    async with running_cluster(script, worker_wait_seconds=60, request_timeout_seconds=1) as cluster:
        status, answer = await cluster.post(TEXT, {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (504, "deadline")
        assert "tokens delivered" in answer["error"]["message"]
        await nothing_is_left(cluster)
