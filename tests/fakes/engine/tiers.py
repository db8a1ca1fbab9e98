"""A public fake of a tier's storage, whose copies are made when a test lets them be made."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from engine.kv_tiers.storage import BlockCopy, storage_name
from engine.settings import EngineSettings

if TYPE_CHECKING:
    from tests.fakes.engine.memory import FakeMemory
    from tests.fakes.engine.sequences import FakeStates


class FakeTierStorage:
    """Fulfils ``TierStorage`` over a FakeMemory.

    is_late: copies wait for ``carry_out``; else they are made at once. hangs: who waits for a limited time waits in vain.
    contents: by slot, what it has, and the hash of that. is_off: it stores and loads nothing any more.
    num_stores_kept: the next store keeps only so many blocks.
    """

    slot_bytes = 1
    has_orders = False
    found: Sequence[tuple[bytes, int]] = ()

    def __init__(self, memory: "FakeMemory", num_slots: int, kind: str = "host", group: int = 0) -> None:
        self.name = storage_name(kind, group)
        self.kind = kind
        self.group = group
        self.outlives_engine = kind == "disk"
        self.num_slots = num_slots
        self.is_off = False
        self.is_late = False
        self.hangs = False
        self.is_closed = False
        self.contents: dict[int, tuple[list[int | None], bytes]] = {}
        self.num_stores_kept: int | None = None
        self.forgotten: list[int] = []
        self.stores: list[list[BlockCopy]] = []
        self.loads: list[list[BlockCopy]] = []
        self._memory = memory
        self._of_loads: list[Future[int]] = []
        self._jobs: list[tuple[Future[int], Callable[[], int]]] = []

    def store(self, copies: Sequence[BlockCopy]) -> "Future[int]":
        """Copy blocks to slots, now or later."""
        self.stores.append(list(copies))
        return self._add(lambda: self._store(copies))

    def load(self, copies: Sequence[BlockCopy]) -> "Future[int]":
        """Copy slots to blocks, now or later."""
        self.loads.append(list(copies))
        future = self._add(lambda: self._load(copies))
        self._of_loads.append(future)
        return future

    def forget(self, slots: Sequence[int]) -> None:
        """Record that content was dropped."""
        self.forgotten.extend(slots)

    def restart(self, model: str | None) -> None:
        """Record that all content was dropped."""
        self.forgotten.extend(range(self.num_slots))

    @property
    def has_jobs(self) -> bool:
        """True while a copy waits."""
        return any(not future.cancelled() for future, _ in self._jobs)

    def begin(self) -> None:
        """Let the first copy begin that was not cancelled; it cannot be cancelled any more."""
        self._jobs = [job for job in self._jobs if not job[0].cancelled()]
        if self._jobs and not self._jobs[0][0].running():
            self._jobs[0][0].set_running_or_notify_cancel()

    def carry_out(self) -> None:
        """Make the first copy that waits and was not cancelled."""
        self.begin()
        if self._jobs:
            future, copy = self._jobs.pop(0)
            future.set_result(copy())

    def damage(self, slot: int) -> None:
        """Let the slot's content be not what was stored."""
        self.contents[slot] = (self.contents[slot][0], b"damaged")

    def settle_stores(self) -> None:
        """Make the copies before the first load."""
        while self._jobs and self._jobs[0][0] not in self._of_loads:
            self.carry_out()

    def settle(self, timeout_seconds: float | None = None) -> bool:
        """Make all copies, unless the storage hangs and the caller does not wait for ever."""
        if self.hangs and timeout_seconds is not None:
            return False
        while self._jobs:
            self.carry_out()
        return True

    def close(self) -> None:
        """Make all copies."""
        self.settle()
        self.is_closed = True

    def _add(self, copy: Callable[[], int]) -> "Future[int]":
        future: Future[int] = Future()
        self._jobs.append((future, copy))
        if not self.is_late:
            self.settle()
        return future

    def _store(self, copies: Sequence[BlockCopy]) -> int:
        if self.is_off:
            return 0
        num_kept = len(copies) if self.num_stores_kept is None else self.num_stores_kept
        self.num_stores_kept = None
        for copy in copies[:num_kept]:
            self.contents[copy.slot] = list(self._memory.slots[copy.block_id]), copy.block_hash
        return min(num_kept, len(copies))

    def _load(self, copies: Sequence[BlockCopy]) -> int:
        for num_intact, copy in enumerate(copies):
            content, block_hash = self.contents[copy.slot]
            if block_hash != copy.block_hash or self.is_off:
                self._memory.scribble([copy.block_id])
                return num_intact
            self._memory.slots[copy.block_id] = list(content)
        return len(copies)


class FakeStateStorage(FakeTierStorage):
    """Keeps the states of slots, which have one piece each."""

    def __init__(
        self, states: "FakeStates", num_slots: int, kind: str, group: int, memory: "FakeMemory"
    ) -> None:
        super().__init__(memory, num_slots, kind, group)
        self._states = states
        self._kept: dict[int, tuple[int, int]] = {}

    def load(self, copies: Sequence[BlockCopy]) -> "Future[int]":
        """Copy slots of the tier to slots of states, now or later; no step may use these meanwhile."""
        pieces = [copy.block_id for copy in copies]
        self._states.begin_reading(pieces)
        future = super().load(copies)
        future.add_done_callback(lambda end: self._states.scribble(pieces) if end.cancelled() else None)
        return future

    def _store(self, copies: Sequence[BlockCopy]) -> int:
        ((piece, slot, block_hash, num_tokens),) = copies
        found = self._states.find(piece)
        is_kept = self.num_stores_kept is None or self.num_stores_kept > 0
        self.num_stores_kept = None
        if self.is_off or not is_kept or found is None or found[0] != num_tokens:
            return 0
        self._kept[slot] = found
        self.contents[slot] = [], block_hash
        return 1

    def _load(self, copies: Sequence[BlockCopy]) -> int:
        ((piece, slot, block_hash, num_tokens),) = copies
        if self.is_off or self.contents[slot][1] != block_hash:
            self._states.scribble([piece])
            return 0
        assert self._kept[slot][0] == num_tokens
        self._states.fill(piece, self._kept[slot])
        return 1


def open_fake_tiers(memory: "FakeMemory", settings: EngineSettings) -> list[FakeTierStorage]:
    """Return a tier "host" of ``host_kv_bytes`` blocks of each group, if that is not 0, and "disk", if there is a folder."""
    sizes = {"host": settings.host_kv_bytes, "disk": settings.disk_kv_bytes if settings.disk_kv_dir else 0}
    kinds = {kind: num_slots for kind, num_slots in sizes.items() if num_slots}
    tiers = [
        FakeTierStorage(region, num_slots, kind, group)
        for group, region in enumerate((memory, *memory.others))
        for kind, num_slots in kinds.items()
    ]
    if (states := memory.states) is not None:
        group = 1 + len(memory.others)
        tiers += [
            FakeStateStorage(states, num_slots, kind, group, memory) for kind, num_slots in kinds.items()
        ]
    return tiers
