"""The last blocks of a long prompt cross layer by layer, while the rest of their forward pass still runs."""

from collections.abc import Sequence
from functools import partial

import pytest
from msgspec.structs import replace

from contract.errors import TransferError
from contract.layout import Side
from contract.requests import ReceiveTransfer
from kv_transfer.control.fetch_effects import FetchPorts
from kv_transfer.control.fetching import FetchTransfers
from kv_transfer.control.incoming_transfer import IncomingTransfer
from kv_transfer.counters import Counters
from kv_transfer.data.publishing import split_points
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import fetch_side, send_side
from kv_transfer.protocol.digests import XxhDigests
from kv_transfer.protocol.fetch_side import Fetch, FetchState, advance_fetch
from kv_transfer.protocol.handshake import Session
from kv_transfer.protocol.messages import BlocksPublished, LayersReadable
from kv_transfer.protocol.orders import Ahead, PullJob
from kv_transfer.protocol.plan import PeerTerms, TransferPlan
from kv_transfer.protocol.reads import BlockPart, Read, ReadRequest, Source
from kv_transfer.protocol.send_side import Send, SendState
from kv_transfer.transports.choosing import Alternatives
from kv_transfer.transports.transport import ReceiverTraits, ReceiverTransport
from tests.kv_transfer.builders import (
    LAYOUT,
    MODEL,
    TOKENS,
    Pair,
    Sides,
    block_content,
    local_worker,
    pair_of,
    prompt_of,
    request_of,
)
from tests.kv_transfer.fakes import ByteMemory

NUM_BLOCKS = 13
SOURCE_IDS, TARGET_IDS = list(range(1, 1 + NUM_BLOCKS)), list(range(40, 40 + NUM_BLOCKS))
LAYER_BYTES = LAYOUT.block_bytes // LAYOUT.num_layers


class UnreadyReceiver:
    """Fails every read of a block's beginning alone."""

    traits = ReceiverTraits()

    def __init__(self, inner: ReceiverTransport) -> None:
        self._inner = inner

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        if request.part is not None and request.part.start_byte == 0:
            raise TransferError("not yet")
        self._inner.fetch(source, request, views, read)

    def forget(self, source: Source) -> None:
        self._inner.forget(source)

    def close(self) -> None:
        self._inner.close()


class LateFailure(UnreadyReceiver):
    """Fails every read of a block's second layer alone, when all of it has landed."""

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        self._inner.fetch(source, request, views, read)
        if request.part is not None and request.part.start_byte:
            raise TransferError("too late")


class SpoilingReceiver:
    """Flips a bit of the layer of this number, in a block that is read layer by layer."""

    traits = ReceiverTraits()

    def __init__(self, number: int, inner: ReceiverTransport) -> None:
        self._number, self._inner = number, inner

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        if request.part is None or request.part.start_byte != (self._number - 1) * LAYER_BYTES:
            self._inner.fetch(source, request, views, read)
            return
        self._inner.fetch(source, request, views, Read())  # a Read that reports no landed blocks
        views[5][0] ^= 1

    def forget(self, source: Source) -> None:
        self._inner.forget(source)

    def close(self) -> None:
        self._inner.close()


def begin(pair: Pair) -> tuple[str, str]:
    """Let block 0 cross, with the others about to be computed; return the keys of both sides."""
    prompt, driver = prompt_of(NUM_BLOCKS), pair.prefill.driver
    send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
    pair.prefill.lend("t-r", SOURCE_IDS[:1])
    driver.sender.open_send(send, SOURCE_IDS, 0)
    pair.decode.driver.receiver.start_fetch(fetch)
    driver.sender.publish(send.key, LAYOUT.block_size)
    driver.step()
    pair.decode.driver.wait_for(lambda: pair.decode.driver.published, "published")
    pair.decode.driver.receiver.receive_into(fetch.key, TARGET_IDS, 0)
    return send.key, fetch.key


def compute_and_receive(pair: Pair, send: str, fetch: str) -> None:
    """Compute the blocks after block 0 in one step; return when all have crossed and were verified."""
    driver, decode = pair.prefill.driver, pair.decode.driver
    driver.sender.publish(send, NUM_BLOCKS * LAYOUT.block_size)
    driver.step()
    driver.sender.finish_send(send, TOKENS)
    decode.wait_for(lambda: fetch in decode.received, "received")


def compute(pair: Pair, number: int) -> None:
    """Write this layer of the blocks after block 0, once what was computed before has crossed."""
    crossed = LAYOUT.block_bytes + (NUM_BLOCKS - 1) * LAYER_BYTES * (number - 1)
    pair.decode.driver.wait_for(lambda: num_bytes(pair) == crossed, f"the reading of {number - 1} layers")
    whole, memory = ByteMemory(LAYOUT, 1), pair.prefill.driver.memory
    start, end = (number - 1) * LAYER_BYTES, number * LAYER_BYTES
    for index, block_id in enumerate(SOURCE_IDS[1:], start=1):
        whole.fill(0, block_content("t-r", index))
        memory.write_view(block_id)[start:end] = whole.read_view(0)[start:end]


def num_bytes(pair: Pair) -> float:
    return pair.decode.count(f"transfer_bytes_total{{transport={pair.decode.settings.transport}}}")


@pytest.mark.parametrize("transport", ["tcp", "shm", "nixl"])
def test_layers_cross_while_later_ones_are_computed(transport: str) -> None:
    """Layer 1 has arrived before layer 2 is computed; each byte crosses once, and digests are of whole blocks."""
    with pair_of(transport=transport) as pair:
        send, fetch = begin(pair)
        driver, decode = pair.prefill.driver, pair.decode.driver
        driver.compute_layer = partial(compute, pair)
        compute_and_receive(pair, send, fetch)
        received = decode.receiver.pop_received(fetch)
        assert received.report.num_bytes == NUM_BLOCKS * LAYOUT.block_bytes == num_bytes(pair)
        assert pair.decode.holds("t-r", TARGET_IDS)
        driver.wait_for(lambda: driver.sent == [send], "sent")


def test_a_read_ahead_that_fails_costs_nothing_but_time() -> None:
    sides = Sides(decode={"decorate": UnreadyReceiver})
    with pair_of(sides) as pair:
        send, fetch = begin(pair)
        decode = pair.decode.driver
        pair.prefill.lend("t-r", SOURCE_IDS)
        compute_and_receive(pair, send, fetch)
        assert decode.receiver.pop_received(fetch).report.num_bytes == num_bytes(pair)
        assert pair.decode.holds("t-r", TARGET_IDS)
        assert decode.failed == {}


def test_what_landed_of_a_read_ahead_that_failed_is_not_digested_twice() -> None:
    with pair_of(Sides(decode={"decorate": LateFailure})) as pair:
        send, fetch = begin(pair)
        pair.prefill.lend("t-r", SOURCE_IDS)
        compute_and_receive(pair, send, fetch)
        assert pair.decode.holds("t-r", TARGET_IDS)
        assert pair.decode.count("transfer_digest_mismatches_total") == 0
        assert pair.decode.count("transfer_failures_total") == 0


@pytest.mark.parametrize("number", range(1, LAYOUT.num_layers + 1))
def test_a_layer_that_is_spoiled_on_its_way_fails_the_digest(number: int) -> None:
    """Whichever was read ahead, the last one included; then the blocks are read as a whole."""
    with pair_of(Sides(decode={"decorate": partial(SpoilingReceiver, number)})) as pair:
        send, fetch = begin(pair)
        pair.prefill.driver.compute_layer = partial(compute, pair)
        compute_and_receive(pair, send, fetch)
        assert pair.decode.count("transfer_digest_mismatches_total") == 1
        assert pair.decode.holds("t-r", TARGET_IDS)


def moving(**changes: object) -> Fetch:
    """Return a fetch of eight reserved blocks: two are cached, and one more is announced and being read."""
    fetch = Fetch(num_blocks=8)
    fetch, _ = fetch_side.on_announced(fetch, 0, 3, 0.0)
    fetch, _ = fetch_side.reserve(fetch, tuple(range(8)), 2)
    assert fetch.state is FetchState.MOVING
    return fetch


def test_only_what_is_new_is_read_ahead() -> None:
    fetch, actions = fetch_side.on_layers(moving(), 3, 5, 100)
    assert actions == [ev.PullBlocks(3, (3, 4, 5, 6, 7), BlockPart(0, 100))]
    fetch, actions = fetch_side.on_layers(fetch, 3, 5, 100)
    assert actions == []
    fetch, actions = fetch_side.on_layers(fetch, 3, 5, 300)
    assert actions == [ev.PullBlocks(3, (3, 4, 5, 6, 7), BlockPart(100, 200))]
    assert fetch.num_posted == 3


@pytest.mark.parametrize(
    "hint",
    [(2, 3, 9), (0, 8, 9), (3, 6, 9)],
    ids=["announced already", "cached", "beyond the prompt"],
)
def test_a_hint_that_is_of_no_use_is_left_alone(hint: tuple[int, int, int]) -> None:
    fetch = moving()
    assert fetch_side.on_layers(fetch, *hint) == (fetch, [])


def test_a_hint_reserves_nothing() -> None:
    """Law 4: memory is taken at the first announcement of whole blocks."""
    fetch = Fetch(num_blocks=8)
    assert fetch_side.on_layers(fetch, 0, 8, 9) == (fetch, [])


def test_blocks_are_quarantined_until_the_read_ahead_is_terminal() -> None:
    """Law 2: the first read has ended, the one ahead has not."""
    fetch, _ = fetch_side.on_layers(moving(), 3, 5, 100)
    fetch, _ = fetch_side.cancel(fetch)
    assert fetch.state is FetchState.DRAINING
    fetch, actions = advance_fetch(fetch, ev.JobStopped())
    assert (fetch.state, actions) == (FetchState.DRAINING, [])
    fetch, actions = advance_fetch(fetch, ev.ReadAheadOver(None))
    assert (fetch.state, actions) == (FetchState.QUARANTINED, [ev.FetchNotice.DRAINED])


def test_a_sender_says_how_far_its_blocks_are_to_who_fetches_them() -> None:
    send = Send(state=SendState.PUBLISHING, lease_seconds=9.0, num_blocks=8)
    ready = ev.LayerRange(2, 6, 64)
    assert send_side.on_layers_ready(send, ready) == (send, []), "no peer fetches"
    send, _ = send_side.on_fetch(send, "peer", 0, 0.0)
    assert send_side.on_layers_ready(send, ready) == (send, [ev.LayerRange(2, 6, 64)])


def test_layers_that_come_behind_the_end_are_revoked_again() -> None:
    """Law 3: the lease that they opened once more has other blocks behind its indices."""
    send = Send(state=SendState.PUBLISHING, lease_seconds=9.0, num_blocks=8, num_ordered=8, peer="peer")
    send, _ = send_side.on_peer_gone(send, "peer", "gone", 0.0)
    after, actions = send_side.on_layers_ready(send, ev.LayerRange(2, 6, 64))
    assert (actions, after.num_revokes) == ([ev.SendNotice.REVOKE], send.num_revokes + 1)


@pytest.mark.parametrize("is_over", [True, False])
def test_blocks_are_verified_on_the_spot_only_when_no_read_of_them_is_open(is_over: bool) -> None:
    """Otherwise the reading thread would report about a fetch that has ended meanwhile."""
    jobs: list[PullJob] = []

    def ignore(*_: object) -> None:
        return

    def choose(session: Session, _tell: object) -> Source:
        return Source(session.worker_id, session.boot_id, "there", session.token, "tcp")

    transfers = FetchTransfers(
        local_worker(),
        FetchPorts(ignore, ignore, jobs.append, ignore, choose, Alternatives(Counters())),
    )
    fetch = request_of("r", prompt_of(2), ReceiveTransfer("t", "p", "b", "127.0.0.1:1"))
    ref = PeerRef("b", is_dialed=True)
    transfers.start_fetch(fetch)
    transfers.link_up(ref, Session("p", "b", "prefill", 3.0, (), "token"))
    transfers.on_message(ref, BlocksPublished("t", 0, "lease", 0, [1]))
    transfers.receive_into(fetch.key, [5, 6], 0)
    transfers.fetch_event(fetch.key, ev.PieceLanded(1, 0.0, 0.0))
    transfers.fetch_event(fetch.key, ev.PieceVerified(1, 0.0))
    transfers.on_message(ref, LayersReadable("t", 0, "lease", 1, 1, LAYOUT.block_bytes))
    ahead = jobs[1].ahead
    assert ahead is not None
    ahead.num_read = ahead.num_digested = LAYOUT.block_bytes
    if is_over:
        transfers.fetch_event(fetch.key, ev.ReadAheadOver((0.0, 0.0)))
    transfers.on_message(ref, BlocksPublished("t", 0, "lease", 1, [2]))
    assert [job.is_here for job in jobs] == [False, False, is_over]


def test_a_hint_of_more_bytes_than_a_block_has_is_left_to_the_reading_thread() -> None:
    """All bytes are here already, but the hint's read verifies nothing: it only fails."""
    transfer = ReceiveTransfer("t", "p", "b", "127.0.0.1:1")
    terms = PeerTerms(TransferPlan(Side(LAYOUT), Side(LAYOUT)), MODEL, None)
    fetching = IncomingTransfer.of(request_of("r", prompt_of(2), transfer), transfer, terms, 0.0)
    fetching.fetch = replace(fetching.fetch, num_posted=1)
    ahead = Ahead(0, 2, XxhDigests((0, 0)), num_read=LAYOUT.block_bytes)
    fetching.ahead = [ahead]
    source = Source("p", "b", "there", "token", "tcp")
    assert not fetching.job(ev.PullBlocks(0, (5, 6)), source).is_here, "a device must digest them"
    ahead.num_digested = LAYOUT.block_bytes
    assert fetching.job(ev.PullBlocks(0, (5, 6)), source).is_here
    beyond = BlockPart(LAYOUT.block_bytes, 1)
    assert not fetching.job(ev.PullBlocks(0, (5, 6), beyond), source).is_here


@pytest.mark.parametrize(
    ("first", "count", "start"), [(3, 5, 64), (4, 4, 0), (3, 2, 0)], ids=["a gap", "within", "fewer"]
)
def test_only_what_takes_up_where_the_last_one_ended_is_read_ahead(
    first: int, count: int, start: int
) -> None:
    """Otherwise the digests would be of other bytes than those that arrived."""
    ahead = Ahead(3, 8, XxhDigests(range(5)))
    assert ahead.goes_on_with(3, 5, 0)
    assert not ahead.goes_on_with(first, count, start)
    ahead.has_failed = True
    assert not ahead.goes_on_with(3, 5, 0)


def test_at_most_so_many_groups_of_layers() -> None:
    assert split_points(24, 4) == {6, 12, 18, 24}
    assert split_points(2, 4) == {1, 2}
    assert split_points(1, 4) == {1}
