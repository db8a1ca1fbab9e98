"""The choice of workers for a request, and when they have room."""

import pytest
from msgspec.structs import replace

from contract.identity import Role
from router.routing.legs import (
    AGGREGATED,
    DECODE,
    EMBED,
    EMBEDDING,
    PREFILL,
    RECOMPUTE,
    LegPlan,
    Placement,
    place_legs,
)
from router.routing.policy import PlacementRequest, missing_role, place
from router.routing.views import WorkerView, WorkerViews

P, D, B = Role.PREFILL, Role.DECODE, Role.AGGREGATED
WISH = PlacementRequest(num_prompt_tokens=20, num_answer_tokens=10)


def worker(role: Role, number: int, tokens: int = 0, running: int = 0, usage: float = 0.0) -> WorkerView:
    return WorkerView(
        worker_id=f"{role.value}-{number}",
        role=role,
        num_requests=1 if tokens else 0,
        num_tokens=tokens,
        max_requests=4,
        max_tokens=100,
        num_running=running,
        kv_cache_usage=usage,
    )


def chosen(workers: list[WorkerView], wish: PlacementRequest = WISH, turn: int = 0) -> Placement | None:
    return place(WorkerViews.of(workers), wish, turn)


def test_the_pair_goes_before_both_unless_both_have_less_to_do() -> None:
    assert chosen([worker(B, 0), worker(P, 0), worker(D, 0)]) == place_legs(
        (PREFILL, "prefill-0"), (DECODE, "decode-0")
    )
    assert chosen([worker(B, 0, tokens=9), worker(P, 0, tokens=10), worker(D, 0)]) == place_legs(
        (AGGREGATED, "both-0")
    )
    assert chosen([worker(B, 0), worker(P, 0)]) == place_legs((AGGREGATED, "both-0"))


@pytest.mark.parametrize(
    ("workers", "best"),
    [
        ([worker(B, 0, tokens=5), worker(B, 1, tokens=4)], "both-1"),
        ([worker(B, 0, running=2), worker(B, 1, running=1)], "both-1"),
        ([worker(B, 0, usage=0.5), worker(B, 1, usage=0.2)], "both-1"),
        ([worker(B, 0, tokens=1), worker(B, 1, running=9, usage=0.9)], "both-1"),
    ],
)
def test_the_least_loaded_worker_is_taken(workers: list[WorkerView], best: str) -> None:
    assert [chosen(workers, turn=turn) for turn in range(3)] == [place_legs((AGGREGATED, best))] * 3


def test_equally_loaded_workers_take_turns() -> None:
    workers = [*[worker(P, i) for i in range(2)], *[worker(D, i) for i in range(3)]]
    placements = [chosen(workers, WISH, turn) for turn in range(6)]
    assert [p and p.worker_of(PREFILL) for p in placements] == ["prefill-0", "prefill-1"] * 3
    assert [p and p.end for p in placements] == ["decode-0", "decode-1", "decode-2"] * 2


@pytest.mark.parametrize(
    ("prefill", "decode", "has_room"),
    [
        (worker(P, 0, tokens=99), worker(D, 0, tokens=70), True),
        (worker(P, 0, tokens=100), worker(D, 0), False),
        (worker(P, 0), worker(D, 0, tokens=71), False),
        (worker(P, 0), replace(worker(D, 0, tokens=1), num_requests=4), False),
        (replace(worker(P, 0, tokens=1), num_requests=4), worker(D, 0), False),
        (worker(P, 0), worker(D, 0, tokens=1, usage=0.96), False),
        (worker(P, 0), replace(worker(D, 0), max_tokens=5), True),
        (worker(P, 0), replace(worker(D, 0), max_requests=0), False),
    ],
)
def test_a_request_waits_until_the_credits_of_both_reach(
    prefill: WorkerView, decode: WorkerView, has_room: bool
) -> None:
    """A prefill worker's queue must be below its limit, a decode leg must fit, unless its worker is idle."""
    assert chosen([prefill, decode]) == (
        place_legs((PREFILL, "prefill-0"), (DECODE, "decode-0")) if has_room else None
    )


def test_a_replay_prefers_the_cache_and_avoids_failed_workers() -> None:
    workers = [worker(P, 0), worker(P, 1, tokens=50), worker(D, 0), worker(D, 1, tokens=50)]
    wish = replace(WISH, is_replay=True, prefer="prefill-1", avoid=frozenset({"decode-0"}))
    assert chosen(workers, wish) == place_legs((PREFILL, "prefill-1"), (DECODE, "decode-1"))
    assert chosen(workers[:3], replace(wish, avoid=frozenset({"decode-0", "prefill-1"}))) == place_legs(
        (PREFILL, "prefill-0"), (DECODE, "decode-0")
    )


def test_a_replay_without_prefill_worker_is_computed_where_it_is_decoded() -> None:
    replay = replace(WISH, is_replay=True)
    assert chosen([worker(D, 0)]) is None
    assert chosen([worker(D, 0)], replay) == place_legs((AGGREGATED, "decode-0"))
    assert chosen([worker(D, 0), worker(P, 0, tokens=100)], replay) is None
    assert chosen([worker(D, 0), worker(P, 0)], replace(replay, is_local=True)) == place_legs(
        (AGGREGATED, "decode-0")
    )
    assert chosen([worker(D, 0, tokens=1), worker(B, 0)], replay) == place_legs((AGGREGATED, "both-0"))


@pytest.mark.parametrize(
    ("workers", "missing", "missing_for_replay"),
    [
        ([], "no prefill and no decode worker", "no prefill and no decode worker"),
        ([worker(P, 0)], "no decode worker", "no decode worker"),
        ([worker(D, 0)], "no prefill worker", None),
        ([worker(D, 0), worker(P, 0)], None, None),
        ([worker(B, 0)], None, None),
        (
            [replace(worker(B, 0), max_requests=0)],
            "no prefill and no decode worker",
            "no prefill and no decode worker",
        ),
    ],
)
def test_what_is_missing_is_named(
    workers: list[WorkerView], missing: str | None, missing_for_replay: str | None
) -> None:
    sizes = WorkerViews.of(workers).sizes
    for found, expected in (
        (missing_role(sizes), missing),
        (missing_role(sizes, RECOMPUTE), missing_for_replay),
    ):
        assert found == (f"{expected} is attached" if expected else None)


def test_legs_begin_behind_what_was_delivered() -> None:
    """A decode leg begins one token later than the leg that computes the prompt: that one emits the first token."""
    replay = replace(WISH, is_replay=True, num_delivered=3)
    pair = chosen([worker(P, 0), worker(D, 0)], replay)
    assert pair and pair.legs == (LegPlan(PREFILL, "prefill-0", 3), LegPlan(DECODE, "decode-0", 4))
    for alone in (worker(B, 0), worker(D, 0)):
        placement = chosen([alone], replay)
        assert placement and placement.legs == (LegPlan(AGGREGATED, alone.worker_id, 3),)
    embedding = chosen([worker(P, 0)], replace(WISH, plan=EMBEDDING))
    assert embedding and embedding.legs == (LegPlan(EMBED, "prefill-0", 0),)


def test_an_embedding_goes_to_a_prefill_worker_else_to_one_that_is_both() -> None:
    wish = replace(WISH, plan=EMBEDDING)
    busy = worker(P, 0, tokens=100)
    assert chosen([worker(D, 0)], wish) is None
    assert chosen([worker(D, 0), worker(P, 0, tokens=5), worker(B, 0)], wish) == place_legs(
        (EMBED, "prefill-0")
    )
    assert chosen([busy, worker(B, 0)], wish) == place_legs((EMBED, "both-0"))
    assert chosen([busy, worker(D, 0)], wish) is None
    avoiding = replace(wish, is_replay=True, avoid=frozenset({"prefill-0"}))
    assert chosen([worker(P, 0), worker(P, 1, tokens=50)], avoiding) == place_legs((EMBED, "prefill-1"))
    assert chosen([worker(P, 0), worker(D, 0)], avoiding) == place_legs((EMBED, "prefill-0"))


@pytest.mark.parametrize(
    ("workers", "missing"),
    [
        ([], "no prefill worker is attached"),
        ([worker(D, 0)], "no prefill worker is attached"),
        ([worker(P, 0)], None),
        ([worker(B, 0)], None),
    ],
)
def test_what_an_embedding_lacks_is_named(workers: list[WorkerView], missing: str | None) -> None:
    assert missing_role(WorkerViews.of(workers).sizes, EMBEDDING) == missing


@pytest.mark.parametrize(
    ("num_running", "num_choices", "has_room"), [(2, 2, True), (2, 3, False), (0, 9, True), (4, 1, False)]
)
def test_choices_begin_together_or_wait(num_running: int, num_choices: int, has_room: bool) -> None:
    """Each choice counts as a leg. A request with more choices than a worker's credit runs there alone."""
    view = replace(worker(B, 0), num_requests=num_running, num_tokens=num_running, max_tokens=10_000)
    assert bool(chosen([view], replace(WISH, num_choices=num_choices))) is has_room
