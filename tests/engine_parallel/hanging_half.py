"""Connector halves that hang on one rank while its process runs: within a call, or in the data thread."""

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from contract.layout import Side
from engine.connector import Computed, ConnectorPair, KVMemory, RankConnectorPlan, RanksConnector
from kv_transfer.connector import TransferFactory
from kv_transfer.ranks.rank_data import RankHalf, RankSettings
from tests.engine_parallel.echoing_half import EchoingHalf, EchoingRanks

HANGING_RANK = 1


def hang() -> None:
    """Never return, and compute nothing."""
    threading.Event().wait()


class HangingHalf(EchoingHalf):
    """A half that never returns from a step's orders on one rank."""

    def execute(self, metadata: Any) -> None:
        """Hang on one rank."""
        if self._name == f"half {HANGING_RANK}":
            hang()


def open_hanging_half(settings: bytes, sock: socket.socket) -> HangingHalf:
    """Open a half. The opener of a RankConnectorPlan."""
    return HangingHalf(settings.decode(), sock)


class HangingRanks(EchoingRanks):
    """The executor's side of the hanging halves."""

    opener = "tests.engine_parallel.hanging_half:open_hanging_half"


class StuckMemory:
    """A ``KVMemory`` in which reading a block never returns."""

    memfd = None
    pool_view = None
    device_pool = None
    states = None
    start = 0

    def __init__(self, memory: KVMemory) -> None:
        self.layout, self.num_blocks, self.write_view = memory.layout, memory.num_blocks, memory.write_view

    @property
    def regions(self) -> "tuple[StuckMemory]":
        """See KVMemory."""
        return (self,)

    def read_view(self, block_id: int) -> memoryview:
        """Hang."""
        hang()
        return self.write_view(block_id)

    def commit(self, block_ids: list[int]) -> None:
        """Do nothing: no KV arrives here."""

    def mark_computed(self) -> Computed:
        """Do nothing: no KV is read."""
        return self

    def synchronize(self) -> None:
        """Do nothing."""


class StuckHalf(RankHalf):
    """A half whose data thread hangs on one rank at the first block that it publishes."""

    def __init__(self, settings: bytes, sock: socket.socket) -> None:
        self._hangs = RankSettings.model_validate_json(settings).rank == HANGING_RANK
        super().__init__(settings, sock)

    def start(self, memory: KVMemory) -> None:
        """See RankConnector."""
        super().start(StuckMemory(memory) if self._hangs else memory)


class StuckRanks:
    """A ``RanksConnector`` that wraps another one and opens its halves as ``StuckHalf``."""

    def __init__(self, ranks: RanksConnector) -> None:
        self.in_process, self.begin, self.close = ranks.in_process, ranks.begin, ranks.close
        self.get_finished = ranks.get_finished
        self._ranks = ranks

    def connect(self, sockets: Sequence[socket.socket], peers: Sequence[int]) -> list[RankConnectorPlan]:
        """See RanksConnector."""
        opener = "tests.engine_parallel.hanging_half:StuckHalf"
        plans = self._ranks.connect(sockets, peers)
        return [msgspec.structs.replace(plan, opener=opener) for plan in plans]


class StuckFactory(TransferFactory):
    """A factory of the real connector with stuck halves."""

    def __call__(self, side: Side, model_fingerprint: str, wake: Callable[[], None]) -> ConnectorPair:
        """See ConnectorFactory."""
        pair = super().__call__(side, model_fingerprint, wake)
        return replace(pair, ranks=StuckRanks(pair.ranks))
