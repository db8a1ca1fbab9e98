"""Which workers a request gets."""

import pytest

from contract.errors import UnavailableError
from contract.identity import Role
from router.policy import Placement, WorkerView, place


def worker(role: Role, number: int, tokens: int = 0, running: int = 0, usage: float = 0.0) -> WorkerView:
    return WorkerView(
        worker_id=f"{role.value}-{number}",
        role=role,
        num_outstanding_tokens=tokens,
        num_running=running,
        kv_cache_usage=usage,
    )


P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH


def test_the_pair_goes_before_both() -> None:
    workers = [worker(B, 0), worker(P, 0, tokens=100), worker(D, 0, tokens=100)]
    assert place(workers, 0) == Placement("prefill-0", "decode-0")
    assert place(workers[:2], 0) == Placement(None, "both-0")


@pytest.mark.parametrize(
    ("workers", "chosen"),
    [
        ([worker(B, 0, tokens=5), worker(B, 1, tokens=4)], "both-1"),
        ([worker(B, 0, running=2), worker(B, 1, running=1)], "both-1"),
        ([worker(B, 0, usage=0.5), worker(B, 1, usage=0.2)], "both-1"),
        ([worker(B, 0, tokens=1), worker(B, 1, running=9, usage=0.9)], "both-1"),
    ],
)
def test_the_least_loaded_worker_is_taken(workers: list[WorkerView], chosen: str) -> None:
    assert [place(workers, turn).decode for turn in range(3)] == [chosen] * 3


def test_equally_loaded_workers_take_turns() -> None:
    workers = [*[worker(P, i) for i in range(2)], *[worker(D, i) for i in range(3)]]
    placements = [place(workers, turn) for turn in range(6)]
    assert [p.prefill for p in placements] == ["prefill-0", "prefill-1"] * 3
    assert [p.decode for p in placements] == ["decode-0", "decode-1", "decode-2"] * 2


@pytest.mark.parametrize(
    ("workers", "missing"),
    [
        ([], "no prefill and no decode worker"),
        ([worker(P, 0)], "no decode worker"),
        ([worker(D, 0)], "no prefill worker"),
    ],
)
def test_what_is_missing_is_named(workers: list[WorkerView], missing: str) -> None:
    with pytest.raises(UnavailableError, match=missing):
        place(workers, 0)
