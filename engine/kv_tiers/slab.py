"""One file of the tier on a disk: a header, a table with an entry for each slot, and the slots with the blocks' bytes.

The header names the model, the layout of its KV and the rank that has it, so that a file is used only for KV that is equal
to its own. An entry is written behind its block, and cleared before it, so that a process that is killed leaves no entry for
a part of a block. What the system itself loses (writes are not synchronised) is damage, which digests and the checks of
entries reveal.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from contract.block_hash import BlockHash
from contract.decoding import Count, Positive, json_decoder
from contract.layout import KVLayout

SUFFIX = ".slab"
_MAGIC = b"kvbaton KV slab\n"
_HEADER_BYTES = 4096
# Magic, check, length of what follows.
_START = struct.Struct(f"<{len(_MAGIC)}sQI")
# Hash of the content, digest, number of the store, check.
_ENTRY = struct.Struct("<16sQQQ")
_CHECKED_BYTES = _ENTRY.size - 8
_EMPTY = bytes(_ENTRY.size)


class SlabHeader(msgspec.Struct, frozen=True):
    """The content of a slab: KV of ``model`` (its fingerprint) in blocks of ``layout``, which one rank of several has.

    group: the name of a group of layers; none of the first one.
    """

    model: str
    layout: KVLayout
    num_slots: Count = 0
    rank: Count = 0
    num_ranks: Positive = 1
    version: int = 1
    group: str = ""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.layout.block_bytes

    @property
    def first_slot(self) -> int:
        """The place of the first slot in the file; the table is before it."""
        return _HEADER_BYTES + -(-self.num_slots * _ENTRY.size // _HEADER_BYTES) * _HEADER_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return self.first_slot + self.num_slots * self.slot_bytes

    def num_slots_in(self, num_bytes: int) -> int:
        """Return how many slots a file of this size has room for, 0 or more."""
        return max(0, (num_bytes - 2 * _HEADER_BYTES) // (self.slot_bytes + _ENTRY.size))

    def encode(self) -> bytes:
        """Return the bytes of the header. Raises ValueError if they are too many."""
        text = msgspec.json.encode(self)
        encoded = _START.pack(_MAGIC, xxhash.xxh3_64_intdigest(text), len(text)) + text
        if len(encoded) > _HEADER_BYTES:
            raise ValueError(f"the header of a slab has {len(encoded)} bytes; {_HEADER_BYTES} is the limit")
        return encoded.ljust(_HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, encoded: bytes) -> "SlabHeader":
        """Return a header. Raises ValueError for what is none, or is damaged."""
        if len(encoded) < _HEADER_BYTES or not encoded.startswith(_MAGIC):
            raise ValueError("it is no file of a KV tier")
        _, check, length = _START.unpack_from(encoded)
        text = encoded[_START.size : _START.size + length]
        if xxhash.xxh3_64_intdigest(text) != check:
            raise ValueError("its header is damaged")
        try:
            return _decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise ValueError(f"its header is of another version ({error})") from error


_decoder: msgspec.json.Decoder[SlabHeader] = json_decoder(SlabHeader)


class SlabEntry(NamedTuple):
    """The content of a slot. number: of the store, over all slabs of a tier: the order in which contents came."""

    block_hash: BlockHash
    digest: int
    number: int


class Slab:
    """An open slab. Each method raises OSError if the disk fails. ``close`` ends it."""

    def __init__(self, descriptor: int, header: SlabHeader) -> None:
        self.header = header
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path, header: SlabHeader) -> "Slab":
        """Create the file, of which only the header takes room on the disk now. Raises OSError."""
        # Under another name until its header is there: a process that is killed meanwhile leaves no slab without one.
        unfinished = path.with_suffix(".new")
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write(descriptor, header.encode(), 0)
            os.truncate(descriptor, header.num_bytes)
            unfinished.rename(path)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, header)

    @classmethod
    def open(cls, path: Path) -> "Slab":
        """Open a file. Raises OSError, and ValueError for one that is no slab."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(descriptor, SlabHeader.decode(os.pread(descriptor, _HEADER_BYTES, 0)))
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def num_missing_bytes(self) -> int:
        """Bytes of the file that the disk has not given to it yet."""
        status = os.fstat(self._descriptor)
        return max(0, self.header.num_bytes - status.st_blocks * 512)

    def entries(self) -> Iterator[tuple[int, SlabEntry]]:
        """Yield the slots that have content, with their entries; damaged entries are left out."""
        table = os.pread(self._descriptor, self.header.num_slots * _ENTRY.size, _HEADER_BYTES)
        for slot in range(len(table) // _ENTRY.size):
            encoded = table[slot * _ENTRY.size : (slot + 1) * _ENTRY.size]
            block_hash, digest, number, check = _ENTRY.unpack(encoded)
            if encoded != _EMPTY and check == _check_of(encoded, slot):
                yield slot, SlabEntry(block_hash, digest, number)

    def write(self, slot: int, entry: SlabEntry, content: memoryview) -> None:
        """Write a block, and then its entry."""
        self.clear(slot)
        _write(self._descriptor, content, self._place_of(slot))
        encoded = _ENTRY.pack(*entry, 0)
        encoded = _ENTRY.pack(*entry, _check_of(encoded, slot))
        _write(self._descriptor, encoded, _HEADER_BYTES + slot * _ENTRY.size)

    def read_into(self, slot: int, content: memoryview) -> bool:
        """Read a block; return False if the file is too short for it."""
        place = self._place_of(slot)
        num_read = 0
        while num_read < len(content):
            num_new = os.preadv(self._descriptor, [content[num_read:]], place + num_read)
            if not num_new:
                return False
            num_read += num_new
        return True

    def clear(self, slot: int) -> None:
        """Clear the entry of a slot: what is in it is not found any more."""
        _write(self._descriptor, _EMPTY, _HEADER_BYTES + slot * _ENTRY.size)

    def restart(self, header: SlabHeader) -> None:
        """Clear all entries, and write another header for as many slots of the same size."""
        _write(self._descriptor, bytes(self.header.num_slots * _ENTRY.size), _HEADER_BYTES)
        _write(self._descriptor, header.encode(), 0)
        self.header = header

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _place_of(self, slot: int) -> int:
        return self.header.first_slot + slot * self.header.slot_bytes


def _check_of(encoded: bytes, slot: int) -> int:
    """Return the check of an encoded entry: it depends on the slot, too."""
    return xxhash.xxh3_64_intdigest(encoded[:_CHECKED_BYTES], slot)


def _write(descriptor: int, content: bytes | memoryview, place: int) -> None:
    rest = memoryview(content)
    while rest:
        num_written = os.pwritev(descriptor, [rest], place)
        rest = rest[num_written:]
        place += num_written
