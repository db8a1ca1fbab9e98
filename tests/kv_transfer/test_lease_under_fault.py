"""A lease between its last sign of life and its end: every window in which a read could slip through."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from contract.layout import KVLayout
from contract.requests import SendTransfer
from engine.connector import FirstToken
from kv_transfer.control.sending import SendTransfers
from kv_transfer.control.transfers import Transfers
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source, StaleLeaseError
from kv_transfer.transports.leases import LeaseBook, Sessions
from kv_transfer.transports.tcp.transport import TcpReceiver, TcpSender
from kv_transfer.transports.transport import ReceiverTraits
from tests.kv_transfer.builders import (
    LAYOUT,
    TOKENS,
    Pair,
    Sides,
    local_worker,
    pair_of,
    prompt_of,
    request_of,
)
from tests.kv_transfer.fakes import ByteMemory, GatedMemory, context_of

WAIT = 30.0
NAME = LeaseName("t", 0, "lease")
SMALL = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")


class LendingTransfers:
    """A SendTransfers with a clock of its own; its messages are kept."""

    def __init__(self, max_parked: int = 1024) -> None:
        self.now = 100.0
        self.said: list[msg.Message] = []
        self.released: list[LeaseName] = []
        self.transfers = SendTransfers(
            local_worker(max_parked=max_parked),
            self._post,
            self.released.append,
            lambda _: None,
            lambda: self.now,
        )

    def _post(self, _ref: PeerRef, message: msg.Message) -> None:
        self.said.append(message)

    def lend_everything(self, transfer_id: str = "t") -> None:
        request = request_of("r", prompt_of(2), SendTransfer(transfer_id))
        self.transfers.open_send(request, [3, 4], 0)
        self.transfers.publish(request.key, 8)
        (order,) = self.transfers.pop_orders()
        self.transfers.send_event(order.key, ev.BlockRange(0, (1, 2)))
        self.transfers.finish_send(request.key, [FirstToken(1)])

    def state(self) -> str:
        return str(self.transfers.debug_state()[0]["state"])


def test_a_lease_lives_as_long_as_its_peer_pings_and_ends_lease_seconds_after_the_last_one() -> None:
    lending = LendingTransfers()
    lending.lend_everything()
    lending.transfers.on_fetch("peer", msg.FetchBlocks("t", 0))
    for _ in range(10):
        lending.now += 29.0
        lending.transfers.on_heartbeat("stranger")
        assert lending.transfers.tick(lending.now) == lending.now + 1.0, "another peer's ping renews nothing"
        lending.transfers.on_heartbeat("peer")
        assert lending.transfers.tick(lending.now) == lending.now + 30.0
    last = lending.now
    assert lending.transfers.tick(last + 29.9) == last + 30.0
    assert (lending.state(), lending.released) == ("complete", [])
    assert lending.transfers.tick(last + 30.0) == math.inf
    assert lending.state() == "expired"
    assert [name.transfer_id for name in lending.released] == ["t"]
    assert isinstance(lending.said[-1], msg.TransferFailed)
    lending.transfers.on_heartbeat("peer")
    assert lending.state() == "expired", "nothing brings it back"


def test_a_parked_fetch_waits_under_a_deadline() -> None:
    """Law 4: a fetch whose transfer never opens ends by the clock alone, and its peer is refused."""
    lending = LendingTransfers()
    lending.transfers.on_fetch("peer", msg.FetchBlocks("t", 0))
    assert lending.transfers.tick(lending.now) == lending.now + 30.0
    lending.transfers.on_heartbeat("peer")
    assert lending.transfers.tick(lending.now + 29.9) == lending.now + 30.0, "a ping does not prolong it"
    assert lending.said == []
    assert lending.transfers.tick(lending.now + 30.0) == math.inf
    (refusal,) = lending.said
    assert isinstance(refusal, msg.TransferFailed) and refusal.kind == "deadline"
    assert lending.transfers.gauges()["transfers_parked"] == 0


def test_parked_fetches_are_bounded_for_each_peer() -> None:
    lending = LendingTransfers(max_parked=2)
    for transfer in ("a", "b", "c"):
        lending.transfers.on_fetch("greedy", msg.FetchBlocks(transfer, 0))
    (refusal,) = lending.said
    assert isinstance(refusal, msg.TransferFailed)
    assert (refusal.transfer_id, refusal.kind) == ("c", "overloaded")
    assert (
        refusal.message
        == "this worker already has 2 fetches parked here, for transfers that are not open yet"
    )
    lending.transfers.on_fetch("modest", msg.FetchBlocks("d", 0))
    assert len(lending.said) == 1
    assert lending.transfers.gauges()["transfers_parked"] == 3


def test_a_parked_fetch_from_a_block_that_does_not_exist_is_refused_at_the_opening() -> None:
    """The transfer stays open for a proper fetch."""
    lending = LendingTransfers()
    lending.transfers.on_fetch("bad", msg.FetchBlocks("t", 0, from_block=3))
    lending.lend_everything()
    (refusal,) = lending.said
    assert isinstance(refusal, msg.TransferFailed)
    assert refusal.message == "asked from block 3; the prompt has 2 blocks"
    lending.transfers.on_fetch("good", msg.FetchBlocks("t", 0))
    assert [type(message) for message in lending.said[1:]] == [msg.BlocksPublished, msg.TransferComplete]


class GatedBook(LeaseBook):
    """Lets a read go on from its last byte to the check behind it when ``gate`` is set."""

    def __init__(self, on_idle: Callable[[LeaseName], None]) -> None:
        super().__init__(on_idle)
        self.is_read, self.gate = threading.Event(), threading.Event()

    @contextmanager
    def reading(
        self, request: ReadRequest, interrupt: Callable[[], None] = lambda: None
    ) -> Iterator[Sequence[memoryview]]:
        with super().reading(request, interrupt) as views:
            yield views
        self.is_read.set()
        assert self.gate.wait(WAIT)


def test_a_lease_that_ends_after_the_last_byte_fails_the_read() -> None:
    """The revocation has happened, the connection is not shut down yet: only the second check is left."""
    is_revoked, may_go_on = threading.Event(), threading.Event()

    def on_idle(_name: LeaseName) -> None:
        is_revoked.set()
        assert may_go_on.wait(WAIT)

    sessions, book, memory = Sessions(), GatedBook(on_idle), ByteMemory(SMALL, 2)
    sessions.begin("token")
    context = context_of("b", sessions, on_idle)
    sender, receiver = TcpSender(context), TcpReceiver(WAIT)
    sender.leases = book
    sender.start(memory)
    sender.publish(NAME, [0, 1])
    outcome: list[BaseException | None] = []

    def fetch() -> None:
        views = [memoryview(bytearray(SMALL.block_bytes)) for _ in range(2)]
        try:
            receiver.fetch(
                Source("p", "b", sender.address, "token", "tcp"), ReadRequest(NAME, 0, 2), views, Read()
            )
            outcome.append(None)
        except StaleLeaseError as error:
            outcome.append(error)

    reading = threading.Thread(target=fetch)
    releasing = threading.Thread(target=sender.release, args=(NAME,))
    reading.start()
    try:
        assert book.is_read.wait(WAIT)
        releasing.start()
        assert is_revoked.wait(WAIT)
        book.gate.set()
        reading.join(WAIT)
        assert isinstance(outcome[0], StaleLeaseError)
    finally:
        book.gate.set()
        may_go_on.set()
        reading.join(WAIT)
        releasing.join(WAIT)
        receiver.close()
        sender.close()


@contextmanager
def stuck_in_a_read(memory: GatedMemory, block_ids: Sequence[int]) -> Iterator[tuple[Pair, str, str]]:
    """A decode worker in the middle of its only read; (pair, the lent request, the fetched one)."""
    with pair_of(memory=memory) as pair:
        prompt, decode = prompt_of(3), pair.decode.driver
        send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        pair.prefill.driver.send_all(send, [0, 1, 2], TOKENS)
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: decode.published, "published")
        memory.gate_after_digest(2, pair.prefill.driver)
        decode.receiver.receive_into(fetch.key, list(block_ids), 0)
        try:
            assert memory.is_waiting.wait(WAIT)
            yield pair, send.key, fetch.key
        finally:
            memory.gate.set()


def test_expiry_in_the_middle_of_a_read_fails_closed() -> None:
    memory = GatedMemory(LAYOUT, 64)
    with stuck_in_a_read(memory, [10, 11, 12]) as (pair, send_key, fetch_key):
        prefill, decode = pair.prefill.driver, pair.decode.driver
        control = prefill.scheduler
        assert hasattr(control, "tick")
        control.tick(1e12)  # the lease is over for the sender; its reader still holds the blocks
        prefill.step()
        assert prefill.sent == []
        memory.gate.set()
        decode.wait_for(lambda: fetch_key in decode.failed, "failed")
        assert decode.received == []
        assert decode.memory.committed == []
        prefill.wait_for(lambda: prefill.sent == [send_key], "sent")
        assert pair.prefill.count("leases_expired_total") == 1


def test_blocks_stay_quarantined_until_the_read_is_terminal_and_are_counted() -> None:
    """A read that cannot be stopped soon (its destination thread is in the middle of a block)."""
    entered, may_return = threading.Event(), threading.Event()

    class SlowReceiver:
        traits = ReceiverTraits()

        def fetch(
            self, _source: Source, _request: ReadRequest, views: Sequence[memoryview], _read: Read
        ) -> None:
            entered.set()
            assert may_return.wait(WAIT)
            views[0][:4] = b"late"

        def forget(self, _source: Source) -> None: ...

        def close(self) -> None: ...

    with pair_of(Sides(decode={"decorate": lambda _inner: SlowReceiver()})) as pair:
        prompt, decode = prompt_of(3), pair.decode.driver
        fetch = pair.fetch_request("r", prompt)
        pair.prefill.driver.send_all(pair.send_request("r", prompt), [0, 1, 2], TOKENS)
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: decode.published, "published")
        decode.receiver.receive_into(fetch.key, [10, 11, 12], 1)
        assert entered.wait(WAIT)
        assert decode.receiver.cancel_fetch(fetch.key) is False
        draining = {"num_draining": 1, "num_quarantined": 0, "num_blocks": 2}
        assert decode.scheduler.debug_state()["quarantine"] == draining
        decode.step()
        assert decode.drained == []
        may_return.set()
        decode.wait_for(lambda: decode.drained == [fetch.key], "drained")
        assert set(decode.scheduler.debug_state()["quarantine"].values()) == {0}
        assert decode.memory.committed == []


class OpenTransfers(Transfers):
    """Transfers with an act that the test chooses."""

    def act(self, later: list[Callable[[], None]], error: Exception | None = None) -> None:
        with self._acting():
            self._later += later
            if error is not None:
                raise error


def test_every_act_of_transfers_is_tried() -> None:
    """They run in order, outside the lock and once, whatever the body or an earlier act raises."""
    transfers, done = OpenTransfers(), list[str]()

    def failing() -> None:
        done.append("failing")
        transfers.act([lambda: done.append("nested")])
        raise OSError("an act")

    with pytest.raises(OSError, match="an act"):
        transfers.act([lambda: done.append("first"), failing, lambda: done.append("last")])
    assert done == ["first", "failing", "nested", "last"]
    with pytest.raises(ValueError, match="the body"):
        transfers.act([lambda: done.append("after the body")], ValueError("the body"))
    assert done[4:] == ["after the body"]
    transfers.act([])
    assert len(done) == 5
