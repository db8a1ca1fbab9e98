"""Two workers that live and cannot reach each other: the pair is at fault, neither of the two."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import PeerUnreachableError
from contract.identity import Role
from contract.membership import Registration
from protos import worker_pb2 as pb
from router.admission.unreachable_pairs import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, UnreachablePairs
from router.routing.legs import AGGREGATED, DECODE, PREFILL, place_legs
from router.routing.policy import PlacementRequest, place
from router.routing.running_shares import Held
from router.routing.views import WorkerView, WorkerViews
from router.workers.attached_worker import AttachedWorker
from router.workers.order_stream import OrderStream
from tests.clock import Clock
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_ends import TEXT, TOKENS, nothing_is_left
from tests.router.test_policy import WISH, worker

P, D, B = Role.PREFILL, Role.DECODE, Role.AGGREGATED
ANSWER = "abcdef"
CUT = PeerUnreachableError("the control link to prefill-0 is cut")


def unreachable(task: pb.Task) -> Script:
    """Let every decode leg behind a hand-over fail: it begins one token after the prompt of one token."""
    is_fetching = task.first_index == len(task.prompt_token_ids)
    return Script(tokens=TOKENS, fail_at=task.first_index if is_fetching else None, error=CUT)


async def ask(cluster: Cluster) -> tuple[int, Any]:
    status, answer = await cluster.post(TEXT, {"prompt": "x"})
    return status, answer["choices"][0]["text"] if status == 200 else answer


async def test_a_cut_link_between_the_only_two_workers_costs_one_attempt() -> None:
    """P6: all six requests are answered, the decode worker computes their prompts; only the first one pays for it."""
    async with running_cluster(unreachable) as cluster:
        assert [await ask(cluster) for _ in range(6)] == [(200, ANSWER)] * 6
        assert len(cluster.workers["prefill-0"].received.prefills) == 1
        sources = [call.HasField("source") for call in cluster.workers["decode-0"].received.decodes]
        assert sources == [True, *[False] * 6]
        await nothing_is_left(cluster)


async def test_another_pair_takes_over_from_an_unreachable_one() -> None:
    """P6: the pair is not chosen again and again: one of forty requests pays."""

    def script(task: pb.Task) -> Script:
        return Script(tokens=TOKENS)

    async with running_cluster(script) as cluster:
        cut = await cluster.add(D, "decode-1")
        cut.player.script = unreachable
        assert [await ask(cluster) for _ in range(40)] == [(200, ANSWER)] * 40
        metrics = await cluster.metrics()
        # One more pays after each pause of the pair, of 2, 4 and more seconds, where forty requests take so long.
        assert 1 <= metrics['kvbaton_request_replays_total{kind="peer_unreachable"}'] <= 3
        assert (
            "kvbaton_request_local_recomputes_total" not in metrics
            or not metrics["kvbaton_request_local_recomputes_total"]
        )


def attached(role: Role, name: str) -> AttachedWorker:
    registration = Registration(worker_id=name, role=role.value, max_model_len=100)
    return AttachedWorker(registration, None, OrderStream("w", 10.0), Held(), lambda *_: None)  # type: ignore[arg-type]


def test_one_request_a_pause_tries_the_pair_again() -> None:
    """P6: the pause doubles while the pair keeps failing, and a token ends it."""
    clock = Clock()
    severed, p, d = UnreachablePairs(clock), attached(P, "p"), attached(D, "d")
    pair = frozenset({("p", "d")})
    for _ in range(5):
        severed.record_failure(p, d, CUT)  # requests that were bound before the first failure fail together
    pause = FIRST_PAUSE_SECONDS
    for _ in range(6):
        assert severed.blocked([p, d]) == pair
        clock.now += pause
        assert severed.blocked([p, d]) == frozenset()
        severed.record_probe(p, d)
        assert severed.blocked([p, d]) == pair
        severed.record_failure(p, d, CUT)
        pause = min(2 * pause, LAST_PAUSE_SECONDS)
    severed.record_success(p, d)
    assert severed.blocked([p, d]) == frozenset()


def test_a_worker_that_starts_again_is_another_one() -> None:
    severed, p, d = UnreachablePairs(Clock()), attached(P, "p"), attached(D, "d")
    severed.record_failure(p, d, CUT)
    assert severed.blocked([p, attached(D, "d")]) == frozenset()
    assert severed.blocked([p, d]) == frozenset(), "it was forgotten when its worker had gone"


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[WorkerView], frozenset[tuple[str, str]]]:
    workers = [
        msgspec.structs.replace(
            worker(role, number, tokens=draw(st.sampled_from((0, 0, 40, 99)))), max_length=500
        )
        for role, most in ((P, 3), (D, 3), (B, 1))
        for number in range(draw(st.integers(0, most)))
    ]
    pairs = [(p.worker_id, d.worker_id) for p in workers if p.role is P for d in workers if d.role is D]
    return workers, frozenset(pair for pair in pairs if draw(st.booleans()))


@given(pools(), st.integers(0, 9), st.booleans())
def test_no_unreachable_pair_is_ever_chosen_and_idle_workers_always_serve(
    pool: tuple[list[WorkerView], frozenset[tuple[str, str]]], turn: int, is_replay: bool
) -> None:
    """P6: the ladder as a property: a pair that works, else one that is both, else the decode worker alone."""
    workers, severed = pool
    wish: PlacementRequest = msgspec.structs.replace(WISH, is_replay=is_replay)
    placement = place(WorkerViews.of(workers), wish, turn, severed)
    by_id = {each.worker_id: each for each in workers}
    if placement is not None:
        assert (placement.worker_of(PREFILL), placement.end) not in severed
        assert by_id[placement.end].role in (D, B)
    all_idle = all(each.num_requests == 0 for each in workers)
    roles = {each.role for each in workers}
    if all_idle and (B in roles or {P, D} <= roles):
        assert placement is not None
        has_pair = any(
            (p.worker_id, d.worker_id) not in severed
            for p in workers
            if p.role is P
            for d in workers
            if d.role is D
        )
        assert (placement.worker_of(PREFILL) is not None) == has_pair


def test_with_no_pair_left_the_decode_worker_is_alone() -> None:
    workers = [worker(P, 0), worker(D, 0)]
    severed = frozenset({("prefill-0", "decode-0")})
    assert place(WorkerViews.of(workers), WISH, 0, severed) == place_legs((AGGREGATED, "decode-0"))
    assert place(WorkerViews.of([*workers, worker(B, 0)]), WISH, 0, severed) == place_legs(
        (AGGREGATED, "both-0")
    )
    assert place(WorkerViews.of([*workers, worker(D, 1)]), WISH, 0, severed) == place_legs(
        (PREFILL, "prefill-0"), (DECODE, "decode-1")
    )
