"""The tiers beside the pool of one rank: they are opened here, and one of several ranks carries out its engine's orders."""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection

import msgspec

from contract.cache_layout import CacheGroup
from engine.connector import KVMemory
from engine.kv_cache.sizing import HostProbe
from engine.kv_tiers.disk import DiskTier
from engine.kv_tiers.host import HostTier
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
from engine.kv_tiers.storage import ALONE, GroupPlace, RankPlace, TierStorage
from engine.settings import EngineSettings

logger = logging.getLogger(__name__)


def open_tiers(
    settings: EngineSettings,
    memory: KVMemory,
    model: str,
    groups: Sequence[CacheGroup],
    place: RankPlace = ALONE,
    on_failure: Callable[[str], None] = logger.warning,
) -> list[TierStorage]:
    """Return the storages of one rank that the settings ask for, fastest first.

    model: the fingerprint of the weights. groups: of layers, each with a region of ``memory``. on_failure: see ``DiskTier``.
    Raises SettingError for a size that cannot be, and a folder that cannot be used.
    """
    tiers: list[TierStorage] = []
    places = _places(memory.regions, groups)
    with contextlib.ExitStack() as undo:
        if settings.host_kv_bytes:
            free_bytes = HostProbe().read().free_bytes
            for region, group in places:
                tiers.append(HostTier(region, settings.host_kv_bytes, free_bytes, place.num_ranks, group))
                undo.callback(tiers[-1].close)
        if settings.disk_kv_dir is not None:
            num_bytes = settings.disk_kv_bytes
            for region, group in places:
                tiers.append(
                    DiskTier(region, settings.disk_kv_dir, num_bytes, model, place, on_failure, group)
                )
                undo.callback(tiers[-1].close)
        undo.pop_all()
    return tiers


def _places(regions: Sequence[KVMemory], groups: Sequence[CacheGroup]) -> list[tuple[KVMemory, GroupPlace]]:
    """Return the region of each group, and of states, with its share of a tier, which is that of the pool.

    The blocks of a model of recurrent layers alone have no bytes, and no place.
    """
    sizes = [region.num_blocks * region.layout.block_bytes for region in regions]
    names = ["", *(group.name for group in groups[1:]), "states"]
    each = enumerate(zip(regions, names, sizes, strict=False))
    return [
        (region, GroupPlace(number, name, size / sum(sizes))) for number, (region, name, size) in each if size
    ]


class RankTiers:
    """Owns the tiers of one of several ranks, and carries out the orders for them, in order. Used from one thread.

    storages: opens them, given what is called if one that is named "disk" fails. reports: where ends are reported to, from
    any thread; its owner closes it after ``close``.
    """

    def __init__(
        self, open_storages: Callable[[Callable[[str], None]], Sequence[TierStorage]], reports: Connection
    ) -> None:
        self._reports = reports
        self._sending = threading.Lock()
        self._copies: dict[int, Future[int]] = {}
        storages = open_storages(lambda reason: self._send(TierFailed(DiskTier.kind, reason)))
        self._storages = {storage.name: storage for storage in storages}

    def opened(self) -> list[OpenedTier]:
        """Return a description of each tier, fastest first."""
        return [
            OpenedTier(
                one.name,
                one.num_slots,
                one.slot_bytes,
                list(one.found),
                one.outlives_engine,
                one.kind,
                one.group,
            )
            for one in self._storages.values()
        ]

    def carry_out(self, orders: Sequence[TierOrder]) -> None:
        """Begin what is ordered. Waits for no copy."""
        for order in orders:
            match order:
                case CopyOrder():
                    self._begin(order)
                case CancelOrder(number):
                    if copy := self._copies.get(number):
                        copy.cancel()
                case ForgetOrder(tier, slots):
                    self._storages[tier].forget(slots)
                case RestartOrder(tier, model):
                    self._storages[tier].restart(model)

    def close(self) -> None:
        """Close the tiers; see ``TierStorage``."""
        for storage in self._storages.values():
            storage.close()

    def _begin(self, order: CopyOrder) -> None:
        storage = self._storages[order.tier]
        copy = storage.load(order.copies) if order.is_load else storage.store(order.copies)
        self._copies[order.number] = copy
        copy.add_done_callback(partial(self._report_end, order.number))

    def _report_end(self, number: int, copy: "Future[int]") -> None:
        del self._copies[number]
        if copy.cancelled():
            self._send(CopyEnd(number, None))
        elif error := copy.exception():
            self._send(CopyEnd(number, None, repr(error)))
        else:
            self._send(CopyEnd(number, copy.result()))

    def _send(self, report: TierReport) -> None:
        encoded = msgspec.msgpack.encode(report)
        with self._sending, contextlib.suppress(OSError):  # the engine has ended: so will this process
            self._reports.send_bytes(encoded)
