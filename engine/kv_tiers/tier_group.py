"""The tiers of several ranks as one: each rank keeps its own part of each block, and slots are the same on all.

The law is that of transfers between workers of several ranks: what has happened is what has happened on all ranks. So a copy
is over when it is over on all of them, a block is stored if all have it, and one that is damaged on one rank is damaged.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from itertools import count
from multiprocessing import connection
from multiprocessing.connection import Connection

import msgspec

from contract.block_hash import BlockHash
from contract.decoding import msgpack_decoder
from contract.errors import InternalError
from engine.kv_tiers.orders import (
    CancelOrder,
    CopyEnd,
    CopyOrder,
    ForgetOrder,
    OpenedTier,
    RestartOrder,
    TierFailed,
    TierOrder,
    TierReport,
)
from engine.kv_tiers.storage import BlockCopy

logger = logging.getLogger(__name__)


class _Copy(Future[int]):
    """A copy on all ranks. num_running: ranks that have not reported its end."""

    def __init__(
        self, tier: str, num_blocks: int, num_ranks: int, cancel_on_ranks: Callable[[], None]
    ) -> None:
        super().__init__()
        self.tier = tier
        self._num_running = num_ranks
        self._num_copied: int | None = num_blocks
        self._error: str | None = None
        self._cancel_on_ranks = cancel_on_ranks

    def cancel(self) -> bool:
        """Ask the ranks not to begin. Returns False: until all have answered, one may be copying."""
        if not self.done():
            self._cancel_on_ranks()
        return False

    def add(self, rank: int, end: CopyEnd) -> bool:
        """Add a rank's report; return whether it was the last one."""
        if end.error is not None:
            self._error = f"a copy of a KV tier failed on rank {rank}: {end.error}"
        if end.num_copied is None or self._num_copied is None:
            self._num_copied = None
        else:
            self._num_copied = min(self._num_copied, end.num_copied)
        self._num_running -= 1
        return self._num_running == 0

    def finish(self) -> None:
        """Set the result that all ranks have in common."""
        if self._error is not None:
            self.set_exception(InternalError(self._error))
        elif self._num_copied is None:
            super().cancel()
            self.set_running_or_notify_cancel()
        else:
            self.set_result(self._num_copied)


class TierGroup:
    """Owns the orders that wait for the next step, and the copies that are not over on all ranks. Thread-safe.

    reports: a pipe from each rank; owned. send_now: sends orders to all ranks in a call of their own; returns False, and
    sends nothing, if it cannot be sent now.
    """

    def __init__(self, reports: Sequence[Connection], send_now: Callable[[list[TierOrder]], bool]) -> None:
        self.num_ranks = len(reports)
        self.tiers: dict[str, GroupTier] = {}
        self._send_now = send_now
        self._lock = threading.Lock()
        self._orders: list[TierOrder] = []
        self._copies: dict[int, _Copy] = {}
        self._numbers = count(1)
        self._is_lost = False
        self._thread = threading.Thread(
            target=self._read, args=(reports,), name="kv-tier-reports", daemon=True
        )
        self._thread.start()

    @property
    def has_orders(self) -> bool:
        """True while orders wait for a step."""
        return bool(self._orders)

    def open(self, ranks: Sequence[Sequence[OpenedTier]]) -> "list[GroupTier]":
        """Return the tiers that all ranks have opened."""
        self.tiers = {parts[0].name: GroupTier(self, parts) for parts in zip(*ranks, strict=True)}
        return list(self.tiers.values())

    def pop_orders(self) -> list[TierOrder]:
        """Return the orders that wait, which the caller sends to all ranks."""
        with self._lock:
            orders, self._orders = self._orders, []
        return orders

    def order(self, order: TierOrder) -> None:
        """Let an order travel with the next step."""
        with self._lock:
            self._orders.append(order)

    def begin_copy(self, tier: str, copies: Sequence[BlockCopy], *, is_load: bool) -> "Future[int]":
        """Have all ranks copy; see ``TierStorage``."""
        number = next(self._numbers)
        copy = _Copy(tier, len(copies), self.num_ranks, lambda: self.order(CancelOrder(number)))
        with self._lock:
            is_lost = self._is_lost
            if not is_lost:
                self._copies[number] = copy
                self._orders.append(CopyOrder(tier, number, list(copies), is_load))
        if is_lost:
            copy.set_result(0)
        return copy

    def flush(self) -> None:
        """Send the orders that wait, unless they cannot be sent now."""
        orders = self.pop_orders()
        if orders and not self._send_now(orders):
            with self._lock:
                self._orders = orders + self._orders

    def settle(self, tier: str, timeout_seconds: float | None) -> bool:
        """See ``TierStorage``."""
        self.flush()
        with self._lock:
            copies = [copy for copy in self._copies.values() if copy.tier == tier]
        return not wait(copies, timeout_seconds).not_done

    def close(self) -> None:
        """Wait for the last reports: the ranks have ended."""
        self._thread.join()

    def _read(self, reports: Sequence[Connection]) -> None:
        decoder: msgspec.msgpack.Decoder[TierReport] = msgpack_decoder(TierReport)
        ranks = {reader: rank for rank, reader in enumerate(reports)}
        while ranks:
            for reader in connection.wait(list(ranks)):
                assert isinstance(reader, Connection)
                try:
                    report = decoder.decode(reader.recv_bytes())
                except (EOFError, OSError):
                    del ranks[reader]
                    reader.close()
                    self._lose()
                    continue
                self._on_report(ranks[reader], report)

    def _on_report(self, rank: int, report: TierReport) -> None:
        match report:
            case TierFailed(tier, reason):
                for each in self.tiers.values():  # of all groups of layers
                    if each.kind == tier:
                        each.turn_off(f"rank {rank} of {self.num_ranks}: {reason}")
            case CopyEnd(number):
                with self._lock:
                    copy = self._copies.get(number)
                    is_over = copy is not None and copy.add(rank, report)
                    if is_over:
                        del self._copies[number]
                if copy is not None and is_over:
                    copy.finish()

    def _lose(self) -> None:
        """End all copies, those to come too, so that no caller waits: a rank has ended, and the engine ends with it."""
        with self._lock:
            self._is_lost = True
            copies = list(self._copies.values())
            self._copies.clear()
        for copy in copies:
            copy.set_result(0)


class GroupTier:
    """Fulfils ``TierStorage`` with one tier on each of several ranks. parts: by rank.

    found: what all of them have in the same slot. slot_bytes: of a whole block. If the tier of one rank fails, this one is
    off.
    """

    def __init__(self, group: TierGroup, parts: Sequence[OpenedTier]) -> None:
        first, *others = parts
        self.name = first.name
        self.kind = first.kind
        self.group = first.group
        self.num_slots = min(part.num_slots for part in parts)
        self.slot_bytes = sum(part.slot_bytes for part in parts)
        self.outlives_engine = first.outlives_engine
        self.is_off = False
        self._group = group
        # A rank that was killed behind the others has not stored what they have, or still has what was there before.
        common = set(first.found).intersection(*(part.found for part in others))
        self.found: list[tuple[BlockHash, int]] = [one for one in first.found if one in common]

    @property
    def has_orders(self) -> bool:
        """See TierStorage."""
        return self._group.has_orders

    def store(self, copies: Sequence[BlockCopy]) -> "Future[int]":
        """See TierStorage."""
        return self._begin(copies, is_load=False)

    def load(self, copies: Sequence[BlockCopy]) -> "Future[int]":
        """See TierStorage."""
        return self._begin(copies, is_load=True)

    def forget(self, slots: Sequence[int]) -> None:
        """See TierStorage."""
        self._group.order(ForgetOrder(self.name, list(slots)))

    def restart(self, model: str | None) -> None:
        """See TierStorage."""
        self._group.order(RestartOrder(self.name, model))

    def settle(self, timeout_seconds: float | None = None) -> bool:
        """See TierStorage."""
        return self._group.settle(self.name, timeout_seconds)

    def turn_off(self, reason: str) -> None:
        """Ask the ranks for nothing any more. The first reason is logged."""
        if not self.is_off:
            self.is_off = True
            logger.warning("%s", reason)

    def close(self) -> None:
        """Do nothing: the ranks close what they have opened."""

    def _begin(self, copies: Sequence[BlockCopy], *, is_load: bool) -> "Future[int]":
        if self.is_off:
            nothing: Future[int] = Future()
            nothing.set_result(0)
            return nothing
        return self._group.begin_copy(self.name, copies, is_load=is_load)
