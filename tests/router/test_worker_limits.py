"""A worker that is smaller than the others takes what fits it, and no request is rejected because of it."""

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from contract.errors import SIZE_PARAM, InvalidRequestError
from contract.identity import Role
from contract.layout import KVLayout
from contract.membership import Registration
from protos import WORKER_PROTOCOL_MAX
from protos import worker_pb2 as pb
from router.concurrency import ChangeSignal
from router.routing.legs import EMBEDDING, GENERATION, PREFILL
from router.routing.policy import PlacementRequest, candidates, fits, place
from router.routing.views import WorkerView, WorkerViews
from router.workers.order_stream import OrderStream
from router.workers.registry import Registry
from tests.fakes.router.script import Script
from tests.fakes.router.worker import kv_layout
from tests.router.cluster import running_cluster
from tests.router.test_admission_queue import grant_one
from tests.router.test_ends import TEXT, TOKENS, nothing_is_left
from tests.text.tiny_model import END, byte_ids
from wire.messages import from_proto

P, D, B = Role.PREFILL, Role.DECODE, Role.AGGREGATED
LONG = "x" * 50


async def test_a_smaller_decode_worker_gets_only_what_fits_it() -> None:
    """P5: it attaches while long requests wait: none of them is sent there, all are answered."""
    async with running_cluster(Script(tokens=TOKENS, stall_at=1)) as cluster:
        await grant_one(cluster, "decode-0")
        first = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        cluster.script = lambda _: Script(tokens=TOKENS)
        asking = [asyncio.create_task(cluster.post(TEXT, {"prompt": LONG})) for _ in range(6)]
        await cluster.until(lambda state: state["num_in_line"] == 6)
        small = await cluster.add(D, "small", max_model_len=40)
        status, answer = await cluster.post(TEXT, {"prompt": "x"})
        assert (status, answer["choices"][0]["text"]) == (200, "abcdef"), (
            "the small one is idle, and it fits there"
        )
        assert len(small.received.decodes) == 1
        first.cancel()
        answers = await asyncio.gather(*asking)
        assert [status for status, _ in answers] == [200] * 6
        assert len(small.received.decodes) == 1
        await nothing_is_left(cluster)


@pytest.mark.parametrize(
    ("role", "limits"),
    [(P, {"max_model_len": 40}), (P, {"num_blocks": 3}), (D, {"max_model_len": 40}), (D, {"num_blocks": 3})],
)
async def test_a_request_that_is_too_long_for_one_worker_goes_to_the_larger_one(
    role: Role, limits: dict[str, int]
) -> None:
    """P5: in both directions, by length and by the size of the KV pool."""
    async with running_cluster(Script(tokens=TOKENS)) as cluster:
        small = await cluster.add(role, "small", **limits)
        answers = await asyncio.gather(*(cluster.post(TEXT, {"prompt": LONG}) for _ in range(8)))
        assert [status for status, _ in answers] == [200] * 8
        assert not small.received.prefills
        assert not small.received.decodes


async def test_an_input_that_is_too_long_for_one_prefill_worker_is_embedded_by_the_larger_one() -> None:
    """P5: embeddings too."""
    async with running_cluster(Script()) as cluster:
        small = await cluster.add(P, "small", max_model_len=40)
        status, _ = await cluster.post("/v1/embeddings", {"input": [LONG] * 4})
        assert (status, len(small.received.embeds)) == (200, 0)


async def test_the_refusal_of_one_worker_is_not_the_clients_while_another_one_can() -> None:
    """P5: a worker that refuses although it looked large enough is not asked again."""
    error = InvalidRequestError("the prompt has 50 tokens; this engine takes 39 at most", param=SIZE_PARAM)
    async with running_cluster(Script(tokens=TOKENS)) as cluster:
        small = await cluster.add(D, "decode-1")
        small.player.script = lambda _: Script(tokens=TOKENS, fail_at=1, error=error)
        answers = await asyncio.gather(*(cluster.post(TEXT, {"prompt": LONG}) for _ in range(6)))
        assert [answer["choices"][0]["text"] for _, answer in answers] == ["abcdef"] * 6


async def test_what_every_worker_refuses_is_one_clear_400() -> None:
    """P5: with the words of the last one."""
    error = InvalidRequestError("the prompt has 50 tokens; this engine takes 39 at most", param=SIZE_PARAM)
    async with running_cluster(Script(tokens=TOKENS)) as cluster:
        await cluster.add(D, "decode-1")
        for name in ("decode-0", "decode-1"):
            cluster.workers[name].player.script = lambda task: Script(
                tokens=TOKENS, fail_at=task.first_index, error=error
            )
        status, answer = await cluster.post(TEXT, {"prompt": LONG})
        assert status == 400
        assert "takes 39 at most" in answer["error"]["message"]
        assert answer["error"]["param"] == "prompt"
        assert sum(len(worker.received.decodes) for worker in cluster.workers.values()) == 2
        await nothing_is_left(cluster)


async def test_a_stream_does_not_end_when_only_a_smaller_worker_is_left_for_a_while() -> None:
    """P5: it waits for a large one, and continues there."""

    def script(task: pb.Task) -> Script:
        return Script(tokens=[*byte_ids(b"y" * 60), END], die_at=30 if task.attempt == 0 else None)

    async with running_cluster(script, worker_wait_seconds=30) as cluster:
        small = await cluster.add(D, "small", max_model_len=40)
        body = {"prompt": "x", "max_tokens": 100}
        asking = asyncio.create_task(cluster.post(TEXT, body))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        await cluster.add(D, "decode-0")
        status, answer = await asking
        assert (status, answer["choices"][0]["text"]) == (200, "y" * 60)
        assert not small.received.decodes


async def test_an_answer_that_no_worker_can_finish_is_cut_with_finish_reason_length() -> None:
    """P5: when no large worker comes back, a smaller one continues as far as it can: finish_reason length."""

    def script(task: pb.Task) -> Script:
        return Script(tokens=[*byte_ids(b"y" * 60), END], die_at=20 if task.attempt == 0 else None)

    async with running_cluster(script, worker_wait_seconds=0.2) as cluster:
        small = await cluster.add(D, "small", max_model_len=40)
        status, _ = await cluster.post(TEXT, {"prompt": "x", "max_tokens": 100})
        assert status == 200
        assert len(small.received.decodes) == 1


async def test_the_error_of_a_request_that_fits_no_worker_names_the_limit() -> None:
    """P5: it waited for the large worker that was attached when it was admitted."""
    async with running_cluster(Script(tokens=TOKENS, stall_at=1), worker_wait_seconds=0.3) as cluster:
        await grant_one(cluster, "decode-0")
        first = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": LONG}))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        await cluster.add(D, "small", max_model_len=40)
        await cluster.workers["decode-0"].die()
        status, answer = await asking
        first.cancel()
        assert status == 503
        assert "no attached worker takes 66 tokens" in answer["error"]["message"]
        assert "the limit is 40" in answer["error"]["message"]


async def test_a_request_for_the_large_worker_waits_while_that_is_started_again() -> None:
    """P5: with a smaller one attached it was refused with 400, as if the model could never take it."""
    async with running_cluster(Script(tokens=TOKENS), worker_wait_seconds=30) as cluster:
        await cluster.add(D, "small", max_model_len=40)
        await cluster.workers["decode-0"].die()
        await cluster.until(lambda state: len(state["workers"]) == 2)
        status, _ = await cluster.post(TEXT, {"prompt": "x", "max_tokens": 5})
        assert status == 200, "what fits the small one goes there"
        status, _ = await cluster.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
        )
        assert status == 200, "a length that nobody has asked for is that of the small one"
        asking = [
            asyncio.create_task(cluster.post(TEXT, body))
            for body in ({"prompt": LONG}, {"prompt": "x", "max_tokens": 100})
        ]
        await cluster.until(lambda state: state["num_in_line"] == 2)
        await cluster.add(D, "decode-0")
        answers = await asyncio.gather(*asking)
        assert [status for status, _ in answers] == [200, 200]
        await nothing_is_left(cluster)


async def test_a_large_worker_that_stays_away_is_forgotten() -> None:
    """P5: then the limit is that of the workers which are there."""
    now = 0.0
    registry = Registry(ChangeSignal(), 30.0, lambda: now)
    for name, length in (("decode-0", 100), ("decode-1", 40)):
        registration = Registration(
            protocol_min=WORKER_PROTOCOL_MAX,
            protocol_max=WORKER_PROTOCOL_MAX,
            worker_id=name,
            boot_id="b",
            role="decode",
            address="a:1",
            control_address="a:2",
            model_fingerprint="m@float32",
            kv_layout=from_proto(KVLayout, kv_layout()),
            max_model_len=length,
        )
        registry.attach(
            registry.new_worker(registration, cast(Any, "nothing is called"), OrderStream("w", 10.0))
        )
    registry.detach(registry.get("decode-0"), "its stream closed")
    assert (registry.max_model_len(7), registry.recent_max_model_len(7)) == (40, 100)
    now = 31.0
    assert registry.recent_max_model_len(7) == 40


def _view(number: int, role: Role, length: int, pool: int) -> WorkerView:
    return WorkerView(
        worker_id=f"{role.value}-{number}",
        role=role,
        max_requests=4,
        max_tokens=10**6,
        max_length=length,
        pool_tokens=pool,
    )


workers = st.lists(
    st.builds(
        lambda role, length, pool: (role, length, pool),
        st.sampled_from((P, D, B)),
        st.integers(2, 60),
        st.integers(2, 60),
    ),
    max_size=6,
).map(lambda rows: [_view(number, *row) for number, row in enumerate(rows)])


@given(workers, st.integers(1, 50), st.integers(1, 50), st.booleans(), st.booleans(), st.integers(0, 5))
def test_a_request_is_only_placed_where_it_fits(
    pool: list[WorkerView], prompt: int, answer: int, is_replay: bool, is_embedding: bool, turn: int
) -> None:
    """P5: and where it fits idle workers of every needed role it is placed."""
    wish = PlacementRequest(
        num_prompt_tokens=prompt,
        num_answer_tokens=answer,
        max_length=prompt if is_embedding else prompt + answer,
        is_replay=is_replay,
        plan=EMBEDDING if is_embedding else GENERATION,
    )
    views = WorkerViews.of(pool)
    placement = place(views, wish, turn)
    by_id = {view.worker_id: view for view in pool}
    if placement is None:
        decoders = [view for view in pool if view.role is not P and fits(view.size, wish)]
        is_waiting_for_role = not is_replay and not any(view.role is P for view in pool)
        assert is_embedding or not decoders or (is_waiting_for_role and all(v.role is D for v in decoders))
        assert not (is_embedding and candidates(views, wish))
        return
    end = by_id[placement.end]
    assert (prompt if is_embedding else prompt + answer) <= end.max_length
    assert prompt + (not is_embedding and end.role is not P) <= end.pool_tokens
    if prefill := placement.worker_of(PREFILL):
        assert fits(by_id[prefill].size, wish)
        assert prompt + 1 <= by_id[prefill].max_length
    assert placement.end in candidates(views, wish)


def test_a_worker_that_refused_is_not_asked_again() -> None:
    wish = PlacementRequest(num_prompt_tokens=5, num_answer_tokens=5, max_length=10)
    pool = [_view(0, B, 50, 50), _view(1, B, 50, 50)]
    for turn in range(4):
        placement = place(WorkerViews.of(pool), replace(wish, too_small=frozenset({"both-0"})), turn)
        assert placement is not None
        assert placement.end == "both-1"
