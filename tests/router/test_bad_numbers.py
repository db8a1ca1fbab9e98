"""A worker that sends absurd numbers: its stream ends, its answers are computed elsewhere, and the router serves on."""

import asyncio
import json
import logging
import math
import random
from typing import Any, NoReturn

import pytest

from autoscaler.pools import check_facts, figures
from autoscaler.routers import parse_counts
from contract.identity import Role
from launch.router_admin import merged
from protos import worker_pb2 as pb
from tests.fakes.router.script import Script
from tests.fakes.router.worker import ScriptedWorker
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_ends import TEXT, TOKENS, nothing_is_left
from wire.messages import numbers_of

ANSWER = "abcdef"
BOTH = (Role.AGGREGATED,)
NUMBERS: tuple[float, ...] = (math.nan, math.inf, -math.inf, -1, -1e300, 2**60, 2**31, 0, 1e-300, 1, 7)


async def ask(cluster: Cluster, **fields: Any) -> tuple[int, Any]:
    status, answer = await cluster.post(TEXT, {"prompt": "x", **fields})
    return status, answer["choices"][0]["text"] if status == 200 else answer


def _no_json(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


async def admin_json(cluster: Cluster) -> dict[str, Any]:
    """Return the answer of /admin/workers, read by a strict parser."""
    async with cluster.session.get(f"http://{cluster.service.addresses.admin}/admin/workers") as response:
        assert response.status == 200
        return dict(json.loads(await response.text(), parse_constant=_no_json))


async def check_views(cluster: Cluster) -> None:
    """Check that everything that others read is finite, and that the autoscaler takes it."""
    facts = await admin_json(cluster)
    check_facts(facts["workers"])
    figures(merged([facts["workers"]]))
    for pool in facts["pools"].values():
        assert all(
            value is None or 0 <= value < 1e12 for value in pool.values() if not isinstance(value, str)
        )
    metrics = await cluster.metrics()
    assert all(math.isfinite(value) for value in metrics.values())
    async with cluster.session.get(cluster.url("/metrics")) as response:
        parse_counts(await response.text())
    await cluster.debug_state()


def filled(rng: random.Random, message: Any) -> Any:
    """Put random numbers into random fields of a message, as far as their types hold them."""
    fields = numbers_of(type(message))
    for field in rng.sample(fields, rng.randint(1, len(fields))):
        value = rng.choice(NUMBERS)
        is_float = field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT)
        try:
            given = value if is_float else int(value)
            if field.is_repeated:
                getattr(message, field.name).append(given)
            else:
                setattr(message, field.name, given)
        except (ValueError, OverflowError):  # an integer field holds no such value
            continue
    return message


def send_hostile(rng: random.Random, worker: ScriptedWorker) -> None:
    stream = worker.stream
    match rng.randrange(4):
        case 0:
            stream.report(filled(rng, pb.Load()))
        case 1:
            stream.grant(
                filled(rng, pb.Credit(max_requests=8, max_tokens=4096, is_draining=rng.random() < 0.3))
            )
        case 2:
            stream.send(load=filled(rng, pb.Load()))
        case _:
            taken = filled(rng, pb.RoleTaken(role=rng.choice([*PAIR, Role.AGGREGATED]).value))
            stream.set_role(taken.role, taken.epoch)


@pytest.mark.parametrize("seed", range(3))
async def test_random_numbers_in_random_messages_stop_nothing(seed: int) -> None:
    rng = random.Random(seed)
    async with running_cluster(Script(tokens=TOKENS), BOTH) as cluster:
        for number in range(12):
            evil = await cluster.add(rng.choice([*PAIR, Role.AGGREGATED]), f"evil-{number}")
            for _ in range(rng.randint(1, 4)):
                send_hostile(rng, evil)
            assert await ask(cluster) == (200, ANSWER)
            await check_views(cluster)
            await evil.die()
            await cluster.until(lambda state: len(state["workers"]) == 1)
        assert await ask(cluster) == (200, ANSWER)
        await nothing_is_left(cluster)


@pytest.mark.parametrize(
    ("load", "field"),
    [
        (pb.Load(step_seconds=math.nan), "Load.step_seconds is nan"),
        (pb.Load(prefill_seconds_per_token=math.inf), "Load.prefill_seconds_per_token is inf"),
        (pb.Load(prefix_cache_hits=2**60), "Load.prefix_cache_hits is 1152921504606846976"),
        (pb.Load(kv_cache_usage=-1.0), r"Load.kv_cache_usage is -1.0"),
    ],
)
async def test_a_bad_number_ends_the_stream_with_its_name_and_one_line(
    load: pb.Load, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_cluster(Script(tokens=TOKENS), BOTH) as cluster:
        evil = await cluster.add(Role.AGGREGATED, "evil")
        evil.stream.report(load)
        await cluster.until(lambda state: [w["worker_id"] for w in state["workers"]] == ["both-0"])
        assert await ask(cluster) == (200, ANSWER)
    lines = [record for record in caplog.records if field in record.getMessage()]
    assert [line.getMessage().split(":")[0] for line in lines] == ["worker evil is lost"]
    assert not any(record.exc_info for record in caplog.records)


async def test_a_drain_without_a_time_and_orders_that_were_never_sent_end_the_stream() -> None:
    async with running_cluster(Script(tokens=TOKENS), BOTH) as cluster:
        evil = await cluster.add(Role.AGGREGATED, "evil")
        evil.stream.grant(pb.Credit(is_draining=True, drain_seconds=math.nan, number=2))
        await cluster.until(lambda state: len(state["workers"]) == 1)
        await evil.stop()
        liar = await cluster.add(Role.AGGREGATED, "liar")
        liar.stream.claim_orders(2**40)
        await cluster.until(lambda state: len(state["workers"]) == 1)
        assert await ask(cluster) == (200, ANSWER)


async def test_a_registration_with_an_absurd_number_is_refused_with_its_name() -> None:
    async with running_cluster(Script(tokens=TOKENS), BOTH) as cluster:
        with pytest.raises(Exception, match=r"KvLayout\.block_size is 0"):
            await cluster.add(
                Role.AGGREGATED, "evil", kv_layout=pb.KvLayout(num_layers=1, num_kv_heads=1, head_dim=1)
            )


@pytest.mark.parametrize("roles", [BOTH, PAIR])
@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": [5000] * 7},
        {"tokens": [2**32 - 1] * 7},
        {"logprobs": {1: math.nan}},
        {"logprobs": {1: math.inf}},
        {"logprobs": {5000: -0.5}},
        {"timings": pb.LegTimings(prefill_seconds=math.nan)},
        {"timings": pb.LegTimings(transfer_exposed_seconds=-1.0)},
        {"num_cached_tokens": 2**31},
        {"surplus_tokens": 3},
    ],
    ids=lambda wrong: "-".join(wrong),
)
async def test_an_answer_with_wrong_numbers_is_computed_again_elsewhere(
    wrong: dict[str, Any], roles: tuple[Role, ...]
) -> None:
    """Its worker is at fault, and the client reads the right answer."""
    surplus = wrong.get("surplus_tokens", 0)
    fields = {name: value for name, value in wrong.items() if name != "surplus_tokens"}

    def script(task: pb.Task) -> Script:
        if task.attempt:
            return Script(tokens=TOKENS)
        return Script(**{"tokens": TOKENS, "surplus_tokens": surplus, **fields})

    async with running_cluster(script, roles) as cluster:
        for role in roles:
            await cluster.add(role, f"{role.value}-1")
        assert await ask(cluster, logprobs=1, max_tokens=7) == (200, ANSWER)
        metrics = await cluster.metrics()
        assert metrics['kvbaton_request_replays_total{kind="worker_lost"}'] == 1
        await nothing_is_left(cluster)


async def test_an_answer_that_is_wrong_everywhere_is_an_error_that_names_the_fault() -> None:
    async with running_cluster(Script(tokens=[5000] * 3), BOTH, max_replays=1) as cluster:
        status, answer = await ask(cluster)
        assert status == 503
        assert "a worker is at fault: it sent token 5000; the vocabulary has" in answer["error"]["message"]


async def test_an_embedding_that_is_no_number_is_computed_elsewhere() -> None:
    def script(task: pb.Task) -> Script:
        return Script(embedding=(0.5, 0.5) if task.attempt else (math.nan, 0.5))

    async with running_cluster(script, BOTH) as cluster:
        await cluster.add(Role.AGGREGATED, "both-1")
        async with asyncio.timeout(20):
            status, answer = await cluster.post("/v1/embeddings", {"input": "x"})
        assert status == 200
        assert answer["data"][0]["embedding"] == [0.5, 0.5]
