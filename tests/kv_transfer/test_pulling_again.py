"""A read that fails is tried again under the same lease: over another transport where there is one, else over the same."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from contract.errors import TransferError, WorkerLostError
from contract.requests import ReceiveTransfer
from kv_transfer.control.fetch_effects import FetchPorts
from kv_transfer.control.fetching import FetchTransfers
from kv_transfer.counters import Counters
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.handshake import Session
from kv_transfer.protocol.messages import BlocksPublished
from kv_transfer.protocol.orders import PullJob
from kv_transfer.protocol.reads import Read, ReadRequest, Source, StaleLeaseError
from kv_transfer.transports.choosing import Alternatives
from kv_transfer.transports.transport import ReceiverTraits, ReceiverTransport
from tests.kv_transfer.builders import (
    TOKENS,
    Pair,
    Sides,
    hand_over,
    local_worker,
    pair_of,
    prompt_of,
    request_of,
)
from tests.kv_transfer.fakes import CorruptingReceiver

NUM_BLOCKS = 3
TARGET = list(range(30, 30 + NUM_BLOCKS))
OTHER, SAME = (f"transfer_pulled_again_total{{rung={rung}_transport}}" for rung in ("other", "same"))


class BreakingReceiver:
    """The first ``num_times`` reads end with ``error``, behind their first byte."""

    traits = ReceiverTraits()

    def __init__(self, inner: ReceiverTransport, error: Exception, num_times: int = 1) -> None:
        self.inner, self.error, self.num_left = inner, error, num_times
        self.forget, self.close = inner.forget, inner.close

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        self.num_left -= 1
        if self.num_left >= 0:
            views[0][0] ^= 0xFF
            raise self.error
        self.inner.fetch(source, request, views, read)


def moved(pair: Pair) -> dict[str, float]:
    return {name: pair.decode.count(f"transfer_blocks_total{{transport={name}}}") for name in ("shm", "tcp")}


def fail(pair: Pair) -> str:
    """A transfer that ends without KV; returns its error's kind, when nothing of it is left."""
    prompt = prompt_of(NUM_BLOCKS)
    send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
    pair.prefill.driver.send_all(send, [1, 2, 3], TOKENS)
    decode = pair.decode.driver
    decode.receiver.start_fetch(fetch)
    decode.wait_for(lambda: decode.published, "published")
    decode.receiver.receive_into(fetch.key, TARGET, 0)
    decode.wait_for(lambda: decode.failed or decode.received, "an end")
    assert (decode.received, decode.memory.committed) == ([], [])
    pair.prefill.driver.wait_for(lambda: pair.prefill.driver.sent, "the lease's end")
    return decode.failed[fetch.key].kind


def content(pair: Pair) -> list[bytes]:
    return [bytes(pair.decode.driver.memory.read_view(block)) for block in TARGET]


def expected(pair: Pair) -> list[bytes]:
    return [bytes(pair.prefill.driver.memory.read_view(block)) for block in (10, 11, 12)]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(
    "damage",
    [
        partial(CorruptingReceiver, block_index=1, num_times=1),
        partial(BreakingReceiver, error=TransferError("no byte for 10 s")),
        partial(BreakingReceiver, error=WorkerLostError("the data connection broke")),
    ],
    ids=["damaged", "timed out", "broken"],
)
def test_what_went_wrong_once_is_read_once_more(
    transport: str,
    damage: Callable[[ReceiverTransport], ReceiverTransport],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is counted, and logged with its reason, which is reported nowhere else."""
    with pair_of(Sides(decode={"decorate": damage}), transport=transport) as pair:
        hand_over(pair, "r", NUM_BLOCKS, reads=2)
        assert content(pair) == expected(pair)
        assert pair.decode.driver.memory.committed == TARGET
        assert (pair.decode.count(SAME), pair.decode.count(OTHER)) == (1, 0)
        assert pair.decode.driver.failed == {}
    assert caplog.text.count("; reading again over the same transport") == 1


@pytest.mark.parametrize(
    ("error", "num_pulls"),
    [(TransferError("broken"), 1), (StaleLeaseError("it is over"), 0), (ValueError("a bug"), 0)],
)
def test_nothing_is_read_a_third_time_and_a_lease_that_is_over_not_again(
    error: Exception, num_pulls: int
) -> None:
    breaking = partial(BreakingReceiver, error=error, num_times=num_pulls + 1)
    with pair_of(Sides(decode={"decorate": breaking})) as pair:
        assert fail(pair) == ("internal" if isinstance(error, ValueError) else "transfer_failed")
        assert (pair.decode.count(SAME), pair.decode.count(OTHER)) == (num_pulls, 0)
        assert pair.decode.count("transfer_blocks_total{transport=tcp}") == 0


def test_another_transport_comes_first_and_one_that_failed_twice_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By what was published already. A transfer that succeeds in between would wipe the slate clean."""
    damage = partial(CorruptingReceiver, block_index=1, transport="shm")
    with pair_of(Sides(decode={"decorate": damage}), transport="auto") as pair:
        for number in (1, 2):
            hand_over(pair, f"r{number}", NUM_BLOCKS, reads=2)
            assert content(pair) == expected(pair)
            assert moved(pair) == {"shm": 0, "tcp": number * NUM_BLOCKS}
            assert (pair.decode.count(OTHER), pair.decode.count(SAME)) == (number, 0)
        hand_over(pair, "r3", NUM_BLOCKS)
        assert moved(pair) == {"shm": 0, "tcp": 3 * NUM_BLOCKS}
        assert (pair.decode.count(OTHER), pair.decode.count(SAME)) == (2, 0)
        assert pair.decode.count("transfer_transport_left_total{transport=shm}") == 1
        (link,) = pair.decode.driver.scheduler.debug_state()["transports"]
        assert (link["transports"], link["left"]) == (["tcp"], ["shm"])
    assert caplog.text.count("is not read over shm any more: 2 transfers in a row failed") == 1


def test_every_rung_is_climbed_once_and_then_it_fails() -> None:
    with pair_of(
        Sides(decode={"decorate": partial(CorruptingReceiver, block_index=2)}), transport="auto"
    ) as pair:
        assert fail(pair) == "transfer_failed"
        assert (pair.decode.count(OTHER), pair.decode.count(SAME)) == (1, 1)
        assert pair.decode.count("transfer_digest_mismatches_total") == 3
        assert pair.decode.count("transfer_failures_total{kind=transfer_failed}") == 1


def test_a_transport_that_works_again_is_kept() -> None:
    """Two failures with a success between them are not two in a row."""
    damaging: list[CorruptingReceiver] = []

    def decorate(inner: ReceiverTransport) -> ReceiverTransport:
        damaging.append(CorruptingReceiver(inner, block_index=0, num_times=1, transport="shm"))
        return damaging[0]

    with pair_of(Sides(decode={"decorate": decorate}), transport="auto") as pair:
        hand_over(pair, "r1", NUM_BLOCKS, reads=2)
        hand_over(pair, "r2", NUM_BLOCKS)
        damaging[0].num_times = 1
        hand_over(pair, "r3", NUM_BLOCKS, reads=2)
        hand_over(pair, "r4", NUM_BLOCKS)
        assert moved(pair) == {"shm": 2 * NUM_BLOCKS, "tcp": 2 * NUM_BLOCKS}


def test_a_read_that_fails_before_its_transport_is_settled_leaves_the_link_as_it_is() -> None:
    """The first choice did not work; the read over the second one fails before the choice is reported to the fetches."""
    told: list[Callable[[Source, Source], bool]] = []
    jobs: list[PullJob] = []
    alternatives, ref = Alternatives(Counters()), PeerRef("b", is_dialed=True)
    sources = [Source("p", "b", "there", "token", name) for name in ("shm", "tcp")]

    def choose(_session: Session, tell: Callable[[Source, Source], bool]) -> Source:
        told.append(tell)
        alternatives.begin(sources)
        return sources[0]

    def ignore(*_: object) -> None:
        return

    transfers = FetchTransfers(
        local_worker(),
        FetchPorts(ignore, ignore, jobs.append, ignore, choose, alternatives),
    )
    fetch = request_of("r", prompt_of(1), ReceiveTransfer("t", "p", "b", "127.0.0.1:1"))
    transfers.start_fetch(fetch)
    transfers.link_up(ref, Session("p", "b", "prefill", 3.0, (), "token"))
    transfers.on_message(ref, BlocksPublished("t", 0, "lease", 0, [1]))
    transfers.receive_into(fetch.key, [5], 0)
    alternatives.rule_out(sources[0])
    transfers.fetch_event(fetch.key, ev.JobFailed("transfer_failed", "broken", may_heal=True))
    assert [job.source for job in jobs] == sources
    assert jobs[0].read is not jobs[1].read
    assert told[0](*sources), "the link is wanted"
    assert transfers.link_down(ref, "worker_lost", "gone") == sources[1]
