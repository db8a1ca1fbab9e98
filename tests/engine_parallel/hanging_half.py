"""Halves of a connector of which one rank's hangs while its process runs: within a call, or in its data thread."""

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from contract.layout import Side
from engine.connector import KVMemory, RanksConnector, RanksConnectorPair
from kv_transfer.connector import TransferFactory
from kv_transfer.ranks.rank_half import RankHalf
from kv_transfer.ranks.words import RankSettings
from tests.engine_parallel.echoing_half import EchoingHalf, EchoingRanks

HANGING_RANK = 1


def hang() -> None:
    """Never return, and compute nothing."""
    threading.Event().wait()


class HangingHalf(EchoingHalf):
    """One rank never gets back from a step's orders."""

    def execute(self, metadata: Any) -> None:
        """See the class."""
        if self._name == f"half {HANGING_RANK}":
            hang()


def open_hanging_half(settings: bytes, line: socket.socket) -> HangingHalf:
    """An opener."""
    return HangingHalf(settings.decode(), line)


class HangingRanks(EchoingRanks):
    """The executor's side of them."""

    opener = "tests.engine_parallel.hanging_half:open_hanging_half"


class StuckMemory:
    """Fulfils ``KVMemory``. Who reads a block of it never gets it."""

    memfd = None

    def __init__(self, memory: KVMemory) -> None:
        self.layout, self.num_blocks, self.write_view = memory.layout, memory.num_blocks, memory.write_view

    def read_view(self, block_id: int) -> memoryview:
        """See the class."""
        hang()
        return self.write_view(block_id)

    def commit(self, block_ids: list[int]) -> None:
        """Nothing arrives here."""

    def mark_computed(self) -> None:
        """Nothing is read."""


class StuckHalf(RankHalf):
    """The data thread of one rank hangs at the first block that it shall publish."""

    def __init__(self, settings: bytes, line: socket.socket) -> None:
        ours = msgspec.msgpack.decode(settings, type=RankSettings)
        self._hangs = ours.rank == HANGING_RANK
        super().__init__(ours, line)

    def start(self, memory: KVMemory) -> None:
        """See RankConnector."""
        super().start(StuckMemory(memory) if self._hangs else memory)


class StuckRanks:
    """Fulfils ``RanksConnector`` by another one, whose halves it opens as ``StuckHalf``."""

    opener = "tests.engine_parallel.hanging_half:StuckHalf"

    def __init__(self, ranks: RanksConnector) -> None:
        self.settings_of, self.begin, self.close = ranks.settings_of, ranks.begin, ranks.close
        self.take_finished = ranks.take_finished
        self._ranks = ranks

    def connect(self, lines: Sequence[socket.socket]) -> None:
        """See RanksConnector."""
        self._ranks.connect(lines)


class StuckFactory(TransferFactory):
    """The real connector, but for its halves."""

    def for_ranks(self, side: Side, model_fingerprint: str, wake: Callable[[], None]) -> RanksConnectorPair:
        """See RanksConnectorFactory."""
        pair = super().for_ranks(side, model_fingerprint, wake)
        return RanksConnectorPair(pair.scheduler, StuckRanks(pair.ranks), pair.address)
