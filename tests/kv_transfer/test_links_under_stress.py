"""The I/O and data threads survive stops at bad moments, failing accepts, high descriptors, long waits, full sockets."""

import fcntl
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from contract.errors import TransferError
from contract.identity import Role
from contract.options import MAX_SECONDS
from kv_transfer.links.link import Link
from kv_transfer.protocol.handshake import Accepting, Session
from kv_transfer.protocol.messages import TransferFailed
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, ReadStoppedError, Source
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.tcp.transport import TcpReceiver, TcpSender
from tests.kv_transfer.builders import LAYOUT, Sides, hand_over, identity_for, pair_of
from tests.kv_transfer.fakes import ByteMemory, context_of

NAME = LeaseName("t", 0, "lease")


@contextmanager
def lending(boot_id: str) -> Iterator[Source]:
    """A sender that lends one block."""
    sessions, memory = Sessions(), ByteMemory(LAYOUT, 1)
    sessions.begin("token")
    sender = TcpSender(context_of(boot_id, sessions, read_timeout_seconds=10.0))
    memory.fill(0, boot_id.encode())
    sender.start(memory)
    sender.publish(NAME, [0])
    try:
        yield Source("p", boot_id, sender.address, "token")
    finally:
        sender.close()


def fetch(receiver: TcpReceiver, source: Source, read: Read | None = None) -> bytes:
    """Return the beginning of the lent block."""
    view = memoryview(bytearray(LAYOUT.block_bytes))
    receiver.fetch(source, ReadRequest(NAME, 0, 1), [view], read or Read())
    return bytes(view[: len(source.boot_id)])


class StoppedBehindTheLastByte(Read):
    """A read that is stopped when everything has arrived and its connection can still be interrupted."""

    @contextmanager
    def interruptible(self, interrupt: Callable[[], None]) -> Iterator[None]:
        with super().interruptible(interrupt):
            yield
            self.stop()


def test_a_late_stop_does_not_leave_its_dead_connection_to_the_next_read() -> None:
    receiver = TcpReceiver(10.0)
    with lending("boot") as source:
        with pytest.raises(ReadStoppedError):
            fetch(receiver, source, StoppedBehindTheLastByte())
        assert fetch(receiver, source) == b"boot"
        receiver.close()


def test_descriptors_above_1023_are_read_from() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (min(hard, 4096) if hard != resource.RLIM_INFINITY else 4096, hard)
    )
    receiver = TcpReceiver(10.0)
    try:
        with ExitStack() as stack, lending("one") as one, lending("two") as two:
            last = 0
            while last < 1024:
                last = fcntl.fcntl(0, fcntl.F_DUPFD, 3)
                stack.callback(os.close, last)
            assert [fetch(receiver, one), fetch(receiver, two)] == [b"one", b"two"]
            receiver.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_longest_timeouts_can_be_waited_for() -> None:
    patient = dict.fromkeys(("peer_timeout_seconds", "lease_seconds"), float(MAX_SECONDS))
    with pair_of(Sides(patient, patient)) as pair:
        hand_over(pair, "r")


def test_no_ping_queues_behind_bytes_that_wait() -> None:
    """Pinging a peer that reads nothing would spin and grow the queue."""
    accepting = Accepting(identity_for("p", Role.PREFILL))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        link = Link(ours, accepting, 2**20, now=0.0)
        accepting.session = Session("d", "other", Role.DECODE, 30.0, (), "token")
        assert link.ping_at(30.0) == 10.0
        while not link.outbox.wants_write:
            link.queue(TransferFailed("t", 0, "internal", "x" * 65536))
            link.flush(now=1.0)
        assert link.ping_at(30.0) == float("inf")
        with pytest.raises(TransferError, match="wait for a peer that does not read them"):
            for _ in range(9 * 16):
                link.queue(TransferFailed("t", 0, "internal", "x" * 65536))
