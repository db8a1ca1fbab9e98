"""A worker of several ranks without processes: each rank's half is in this one, over a torch-free pool."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from contract.layout import KVLayout, Side
from engine.connector import ConnectorPair, KVMemory, RanksConnector, SingleRankConnector
from kv_transfer.connector import TransferFactory
from kv_transfer.links.framing import FrameBuffer
from kv_transfer.ranks import rank_messages as messages
from kv_transfer.ranks.rank_data import RankHalf
from kv_transfer.settings import TransferSettings
from tests.kv_transfer.builders import LAYOUT, MODEL, Worker
from tests.kv_transfer.fakes import ByteMemory, FilledMemory, TransferDriver

SHARE = msgspec.structs.replace(LAYOUT, num_kv_heads=1)
"""The layout of each of two ranks that share ``LAYOUT``."""


_MAX_BYTES = 2**20


class PlayedRanks:
    """The work of an executor of several ranks, as a ``RankConnector`` for a ``TransferDriver``."""

    def __init__(self, connector: RanksConnector, memories: Sequence[FilledMemory]) -> None:
        self._connector, self._memories = connector, memories
        self.halves: list[RankHalf] = []

    def start(self, memory: KVMemory) -> None:
        """Open every rank's half on its own pool; ``memory`` is not used."""
        pairs = [socket.socketpair() for _ in self._memories]
        ours, theirs = zip(*pairs, strict=True)
        plans = self._connector.connect(ours, [each.fileno() for each in theirs])
        with ExitStack() as unused:
            for each in theirs:
                unused.callback(each.close)
            for rank, (memory_of_rank, plan) in enumerate(zip(self._memories, plans, strict=True)):
                theirs[rank].detach()
                half = plan.open()
                assert isinstance(half, RankHalf)
                self.halves.append(half)
                half.start(memory_of_rank)
        self._connector.begin()

    def watch_layers(self, metadata: Any) -> None:
        """See RankConnector."""

    def execute(self, metadata: Any) -> None:
        """Have every half carry out the orders as they arrive in another process."""
        for half in self.halves:
            half.execute(msgspec.msgpack.decode(msgspec.msgpack.encode(metadata)))

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return what is finished on all ranks."""
        return self._connector.get_finished()

    def close(self) -> None:
        """End the ranks, then the connector."""
        for half in self.halves:
            half.close()
        self._connector.close()


class PlayedRank:
    """A rank's end of its socket, played by a test."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._frames = FrameBuffer(_MAX_BYTES)
        self._received: list[bytes] = []
        end.settimeout(30)

    def receive(self) -> Any:
        """Return the next message."""
        while not self._received:
            self._received += self._frames.feed(self._end.recv(_MAX_BYTES))
        return messages.to_rank.decode(self._received.pop(0))

    def send(self, message: messages.FromRank) -> None:
        """Send a message to the control half."""
        self._end.sendall(messages.to_frame(message))

    def close(self) -> None:
        """End, as when the process dies."""
        self._end.close()


@contextmanager
def worker_of_ranks(
    settings: TransferSettings, memories: Sequence[FilledMemory], layout: KVLayout = SHARE, model: str = MODEL
) -> Iterator[Worker]:
    """Run a connector of ``len(memories)`` ranks; its driver's own memory is not used."""
    driver = TransferDriver(ByteMemory(layout, 1))
    pair = TransferFactory(settings)(Side(layout, len(memories)), model, driver.wake)
    ranks = PlayedRanks(pair.ranks, memories)
    with ExitStack() as stack:
        stack.callback(ranks.close)
        stack.callback(pair.scheduler.close)
        driver.attach(ConnectorPair(pair.scheduler, SingleRankConnector(ranks), pair.address))
        yield Worker(settings, driver)
