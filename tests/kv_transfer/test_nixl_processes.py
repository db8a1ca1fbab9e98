"""``nixl`` between real processes: no wrong byte is used if one dies or stops in the middle of a read.

The senders have UCX's TCP lane only. There a read needs the sender's help, so that one that is stopped leaves it open.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from operator import contains

import pytest

from contract.errors import KvbatonError, PeerUnreachableError
from contract.identity import Role
from kv_transfer.links.framing import parse_address, read_frame, write_frame
from kv_transfer.protocol.reads import (
    RangeGrant,
    Read,
    ReadRequest,
    ReadStoppedError,
    Source,
    StaleLeaseError,
)
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataReply, prove_session
from kv_transfer.transports.nixl.sender import MAX_NIXL_FRAME_BYTES, Help, NixlAsk, NixlPoolInfo, NixlResting
from kv_transfer.transports.transport import ReceiverTraits, ReceiverTransport
from tests.kv_transfer.builders import prompt_of, settings_for, worker
from tests.kv_transfer.nixl_port import (
    BEFORE_POST,
    NAME,
    NUM_BLOCKS,
    TOKEN,
    HookedRead,
    NixlPort,
    Reader,
    from_words,
    is_driving,
)
from tests.kv_transfer.sender_process import Sender, running_sender
from tests.kv_transfer.test_two_processes import prefill_process
from tests.processes import stop

TCP_LANE = {**os.environ, "UCX_TLS": "self,tcp"}  # noqa: TID251 - a child's environment


def sender_process(boot_id: str, environment: dict[str, str] | None = None) -> AbstractContextManager[Sender]:
    return running_sender(["tests.kv_transfer.nixl_port", boot_id], TOKEN, "nixl", environment or TCP_LANE)


def grants_of(sender: Sender) -> tuple[RangeGrant, ...]:
    """Return the grant of all its blocks, the last one first."""
    return from_words(sender.first_message["grant"])


class Hook:
    """Does something once, and lets others wait until that is done."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._is_done = work, threading.Event()

    def __call__(self) -> None:
        self._work()
        self._is_done.set()

    def wait(self) -> None:
        assert self._is_done.wait(30)


class Fetching:
    """A fetch of everything in a thread; ``work`` is done when help was asked for and it is about to be posted."""

    def __init__(self, reader: Reader, sender: Sender, work: Callable[[], None]) -> None:
        reader.receiver.probe(sender.source, Read())
        hook = Hook(work)
        self.read, self.outcome = HookedRead(BEFORE_POST, hook), list[KvbatonError | None]()
        self._thread = threading.Thread(target=self._run, args=(reader, sender))
        self._thread.start()
        hook.wait()

    def end(self) -> KvbatonError | None:
        self._thread.join(60)
        return self.outcome[0]

    def is_running(self) -> bool:
        """Looked at for a moment: what must not end does not."""
        self._thread.join(0.3)
        return self._thread.is_alive()

    def _run(self, reader: Reader, sender: Sender) -> None:
        try:
            reader.fetch(sender.source, range(NUM_BLOCKS), grants_of(sender), read=self.read)
            self.outcome.append(None)
        except KvbatonError as error:
            self.outcome.append(error)


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


@pytest.mark.parametrize("environment", [dict(os.environ), TCP_LANE], ids=["cma", "tcp"])  # noqa: TID251
def test_all_blocks_cross_in_any_order(reader: Reader, environment: dict[str, str]) -> None:
    with sender_process("boot", environment) as sender:
        reader.fetch(sender.source, range(NUM_BLOCKS), grants_of(sender))
        assert all(reader.holds(number, NUM_BLOCKS - number) for number in range(NUM_BLOCKS))
        assert sender.release() == {"idle": 1}
        with pytest.raises(StaleLeaseError, match="ended while 1 blocks were read"):
            reader.fetch(sender.source, range(1), grants_of(sender))


def test_a_lane_that_seems_to_need_no_help_is_helped_late_also_when_the_session_is_over(
    reader: Reader,
) -> None:
    """The sender is kept busy while the reader finds out, and rests when it reads: nothing lands by itself."""
    with sender_process("boot") as sender, ExitStack() as stack:
        address = parse_address(sender.source.address)
        busy = stack.enter_context(socket.create_connection(address, 30.0))
        prove_session(busy, sender.source)
        read_frame(busy, DataReply, MAX_DATA_FRAME_BYTES)
        read_frame(busy, NixlPoolInfo, MAX_NIXL_FRAME_BYTES)
        reader.receiver.probe(sender.source, Read())

        def rest() -> None:
            write_frame(busy, NixlAsk(Help.PAUSE), MAX_NIXL_FRAME_BYTES)
            read_frame(busy, NixlResting, MAX_NIXL_FRAME_BYTES)
            sender.send("end")

        assert Fetching(reader, sender, rest).end() is None
        assert all(reader.holds(number, NUM_BLOCKS - number) for number in range(NUM_BLOCKS))
        with pytest.raises(PeerUnreachableError, match="closed its data connection"):
            reader.fetch(sender.source, range(1), grants_of(sender))


def test_a_sender_killed_in_the_middle_of_a_read_and_its_successor(reader: Reader) -> None:
    """The read ends as an error, what was known of the sender goes, and a new incarnation is a stranger."""
    with sender_process("first") as sender:
        fetching = Fetching(reader, sender, sender.process.kill)
        assert isinstance(fetching.end(), PeerUnreachableError)
        with pytest.raises(KvbatonError):
            reader.fetch(sender.source, range(1), grants_of(sender))
        reader.receiver.forget(sender.source)
    with sender_process("second") as successor:
        reader.fetch(successor.source, range(6, 7), grants_of(successor), [99])
        assert reader.holds(99, NUM_BLOCKS - 6)
    assert is_driving(reader.nixl_thread) is False


def test_a_read_from_a_stopped_sender_stays_open_until_it_is_terminal(reader: Reader) -> None:
    """Stopping it gives nothing back: its bytes do land, later, and only then does fetch return."""
    other = NixlPort("other")
    grants = other.publish(NAME, [41])
    with sender_process("boot") as sender:
        fetching = Fetching(reader, sender, partial(stop, sender.process))
        assert fetching.is_running()
        fetching.read.stop()
        reader.receiver.forget(sender.source)
        assert fetching.is_running()
        assert is_driving(reader.nixl_thread) is True
        assert not reader.holds(0, NUM_BLOCKS)
        reader.fetch(other.source, range(1), grants, [99])
        assert reader.holds(99, 42), "another peer is read meanwhile"
        sender.process.send_signal(signal.SIGCONT)
        assert isinstance(fetching.end(), ReadStoppedError)
        assert reader.holds(0, NUM_BLOCKS)
        assert is_driving(reader.nixl_thread) is False
    other.sender.close()


def test_closing_the_agent_ends_a_read_from_a_stopped_sender(reader: Reader) -> None:
    """Without an agent nothing can land."""
    with sender_process("boot") as sender:
        fetching = Fetching(reader, sender, partial(stop, sender.process))
        assert fetching.is_running()
        reader.receiver.close()
        assert isinstance(fetching.end(), KvbatonError)
        sender.process.send_signal(signal.SIGCONT)
        assert sender.release() == {"idle": 1}
        assert not reader.holds(0, NUM_BLOCKS)


class SparedRead(Read):
    """Stands for another read, and has its hook."""

    def __init__(self, inner: Read, hook: Callable[[], None]) -> None:
        super().__init__()
        self._inner, self._hook, self._looks_left = inner, hook, BEFORE_POST

    def check(self) -> None:
        self._looks_left -= 1
        if self._looks_left == 0:
            self._hook()
        self._inner.check()


class HookingReceiver:
    """Calls ``hook`` when the next fetch has been granted and is about to be posted."""

    traits = ReceiverTraits()

    def __init__(self, inner: ReceiverTransport, hook: Callable[[], None]) -> None:
        self._inner, self._hook = inner, hook

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        self._inner.fetch(source, request, views, SparedRead(read, self._hook))

    def forget(self, source: Source) -> None:
        self._inner.forget(source)

    def close(self) -> None:
        self._inner.close()


def test_blocks_stay_in_quarantine_while_their_sender_is_stopped() -> None:
    """A cancelled fetch holds its blocks until the sender goes on; then they are free, and late bytes did no harm."""
    with prefill_process("nixl", environment=TCP_LANE) as prefill:
        stopping = Hook(partial(stop, prefill.process))
        hooks = [Hook(lambda: None), stopping]
        patient = settings_for(
            "d",
            Role.DECODE,
            peer_timeout_seconds=300.0,
            transport="nixl",
            decorate=lambda inner: HookingReceiver(inner, lambda: hooks.pop(0)()),
        )
        with worker(patient) as decode:
            driver, prompt = decode.driver, prompt_of(3)
            for name in ("first", "r"):
                fetch = prefill.fetch_request(name, prompt)
                driver.receiver.start_fetch(fetch)
                prefill.tell("open", name=name, num_tokens=len(prompt))
                prefill.tell("publish", num_tokens=len(prompt))
                driver.wait_for(partial(contains, driver.published, fetch.key), "published")
                driver.receiver.receive_into(fetch.key, [1, 2, 3], 0)
                if name == "first":
                    prefill.tell("finish")
                    driver.wait_for(lambda: driver.received, "received")
            stopping.wait()
            assert driver.receiver.cancel_fetch(fetch.key) is False
            with pytest.raises(TimeoutError):
                driver.wait_for(lambda: driver.drained, "drained", timeout_seconds=0.5)
            assert decode.count("transfers_quarantined") == 1
            prefill.process.send_signal(signal.SIGCONT)
            driver.wait_for(lambda: driver.drained == [fetch.key], "drained")
            assert decode.count("transfers_quarantined") == 0
            assert driver.memory.committed == [1, 2, 3], "the first transfer's"
