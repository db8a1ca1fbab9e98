"""The folder of slabs that one engine uses: which files are its own, and the numbering of their slots."""

import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import msgspec

from contract.errors import SettingError
from engine.kv_tiers.slab import SUFFIX, Slab, SlabEntry, SlabHeader

logger = logging.getLogger(__name__)

# Small enough to be copied or deleted by hand, and to read its table at once.
_SLAB_BYTES = 2**30


class SlabFolder:
    """Owns the slabs in a folder that have the content of ``header``, and numbers their slots; others are left alone.

    num_bytes: the most that these files and those of the other ranks may have together; each rank has an equal part.
    entries: the slots that had content at the start. Raises SettingError if the folder cannot be used, is in use, or has no
    room.
    """

    def __init__(self, path: Path, num_bytes: int, header: SlabHeader) -> None:
        self.path = path
        self._resources = ExitStack()
        with ExitStack() as undo:
            undo.enter_context(self._resources)
            try:
                self._lock(path)
                self._slabs = self._open(path, num_bytes, header)
                self.entries = list(self._find_entries())
            except OSError as error:
                raise SettingError(
                    f"disk_kv_dir is {path}, which cannot be used ({error.strerror or error}): give a folder that this"
                    " process may write to",
                    param="disk_kv_dir",
                ) from error
            undo.pop_all()
        self._places = [(slab, slot) for slab in self._slabs for slot in range(slab.header.num_slots)]

    @property
    def num_slots(self) -> int:
        """The number of slots of all slabs."""
        return len(self._places)

    def write(self, slot: int, entry: SlabEntry, content: memoryview) -> None:
        """See Slab."""
        slab, place = self._places[slot]
        slab.write(place, entry, content)

    def read_into(self, slot: int, content: memoryview) -> bool:
        """See Slab."""
        slab, place = self._places[slot]
        return slab.read_into(place, content)

    def clear(self, slots: Sequence[int]) -> None:
        """See Slab."""
        for slot in slots:
            slab, place = self._places[slot]
            slab.clear(place)

    def restart(self, model: str | None) -> None:
        """Clear all entries. model: the fingerprint of the weights from now on, if they have changed. Raises OSError."""
        for slab in self._slabs:
            slab.restart(msgspec.structs.replace(slab.header, model=model or slab.header.model))

    def close(self) -> None:
        """Close the files, and let another engine use the folder. May be called twice."""
        self._resources.close()

    def _find_entries(self) -> Iterator[tuple[int, SlabEntry]]:
        first = 0
        for slab in self._slabs:
            for slot, entry in slab.entries():
                yield first + slot, entry
            first += slab.header.num_slots

    def _lock(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._resources.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SettingError(
                f"disk_kv_dir is {path}, which another engine uses: give each engine a folder of its own",
                param="disk_kv_dir",
            ) from error

    def _open(self, path: Path, num_bytes: int, header: SlabHeader) -> list[Slab]:
        """Open the slabs that can be used, in the order of their names, and create what is missing."""
        slabs: list[Slab] = []
        part = num_bytes // header.num_ranks
        for file in sorted(path.glob(f"*{SUFFIX}")):
            why_not = self._add_slab(slabs, file, part, header)
            if why_not:
                logger.warning("%s is not used, and not changed: %s", file, why_not)
        num_left = part - sum(slab.header.num_bytes for slab in slabs)
        # The other ranks' folders are on this disk, too, and miss as much.
        num_missing = (num_left + sum(slab.num_missing_bytes for slab in slabs)) * header.num_ranks
        disk = os.statvfs(path)
        num_free = disk.f_bavail * disk.f_frsize
        if num_missing > num_free:
            raise SettingError(
                f"disk_kv_bytes is {num_bytes}, of which {num_missing} bytes are not on the disk of {path} yet, and"
                f" {num_free} are free there; lower it",
                param="disk_kv_bytes",
            )
        new: list[SlabHeader] = []
        while num_slots := header.num_slots_in(min(num_left, _SLAB_BYTES)):
            new.append(msgspec.structs.replace(header, num_slots=num_slots))
            num_left -= new[-1].num_bytes
        if not slabs and not new:
            one = msgspec.structs.replace(header, num_slots=1)
            raise SettingError(
                f"disk_kv_bytes is {num_bytes} bytes, and a file with one block has"
                f" {one.num_bytes}{f' on each of {one.num_ranks} ranks' if one.num_ranks > 1 else ''}; raise it",
                param="disk_kv_bytes",
            )
        names = (path / f"kv-{number:04}{SUFFIX}" for number in count())
        for one in new:
            slab = Slab.create(next(name for name in names if not name.exists()), one)
            self._resources.callback(slab.close)
            slabs.append(slab)
        return slabs

    def _add_slab(self, slabs: list[Slab], file: Path, part: int, header: SlabHeader) -> str | None:
        """Open a file, and add it; return why it is not used, if so. Raises OSError."""
        try:
            slab = Slab.open(file)
        except ValueError as error:
            return str(error)
        found = slab.header
        why_not = None
        if found != msgspec.structs.replace(header, num_slots=found.num_slots):
            of_group = f" ({found.group})" if found.group else ""
            why_not = (
                f"it has KV of model {found.model} in {found.layout}{of_group}, of rank {found.rank} of"
                f" {found.num_ranks} (version {found.version})"
            )
        elif found.num_bytes > part - sum(one.header.num_bytes for one in slabs):
            of_rank = f" of rank {found.rank}" if found.num_ranks > 1 else ""
            why_not = f"with its {found.num_bytes} bytes the files{of_rank} would have more than disk_kv_bytes ({part})"
        if why_not:
            slab.close()
            return why_not
        self._resources.callback(slab.close)
        slabs.append(slab)
        return None
