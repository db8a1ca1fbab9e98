"""The tier on a disk: content survives a restart, and what is damaged, foreign or half written is never used."""

import logging
import os
import random
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import xxhash

from contract.errors import SettingError
from engine.kv_cache.memory import PagedKVMemory
from engine.kv_tiers.disk import DiskTier
from engine.kv_tiers.slab import Slab, SlabEntry, SlabHeader
from engine.kv_tiers.storage import BlockCopy
from tests.soak_settings import soak_factor, soak_seed
from tests.tier_pools import LAYOUT, content, hash_of, pool_of

ROOM = 2**16
MODEL = "model@bfloat16"
NUM_FLIPS = min(1000, 100 * soak_factor())
"""Bits that are flipped, one at a time: 1,000 in a soak."""


def stored_copies(tier: DiskTier, blocks: range) -> list[BlockCopy]:
    """Store blocks in slots of their own; return the copies."""
    copies = [BlockCopy(block, block - 1, hash_of(block)) for block in blocks]
    assert tier.store(copies).result() == len(copies)
    return copies


@contextmanager
def opened(
    folder: Path, memory: PagedKVMemory, num_bytes: int = ROOM, model: str = MODEL
) -> Iterator[DiskTier]:
    tier = DiskTier(memory, folder, num_bytes, model)
    try:
        yield tier
    finally:
        tier.close()


@pytest.mark.parametrize("kind", ["host", "device"])
def test_blocks_go_there_and_come_back_after_a_restart(tmp_path: Path, kind: str) -> None:
    """A17: the index is rebuilt from the files, in the order in which the contents came."""
    memory = pool_of(kind)
    kept = content(memory, 1, 2, 3)
    with opened(tmp_path / "new" / "folder", memory) as tier:
        assert tier.found == [] and tier.num_slots > 20
        copies = stored_copies(tier, range(1, 4))
        tier.store([copies[0]]).result()
    memory.pool.zero_()
    with opened(tmp_path / "new" / "folder", memory) as tier:
        assert tier.found == [(hash_of(2), 1), (hash_of(3), 2), (hash_of(1), 0)]
        back = [copy._replace(block_id=place) for place, copy in zip((5, 4, 8), copies, strict=True)]
        assert tier.load(back).result() == 3
    assert content(memory, 5, 4, 8) == kept
    assert not memory.pool[[0, 1, 2, 3, 6, 7]].any()
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.slab")) <= ROOM
    memory.close()


def test_a_flipped_bit_of_a_file_is_noticed(tmp_path: Path) -> None:
    """Law 3: wherever it is, in the header, the table or a block: content is right, or not there."""
    memory = pool_of()
    with opened(tmp_path, memory) as tier:
        copies = stored_copies(tier, range(1, 9))
    kept = content(memory, *range(1, 9))
    (file,) = tmp_path.glob("*.slab")
    whole = file.read_bytes()
    end = whole.rindex(kept[-1]) + LAYOUT.block_bytes
    drawn = random.Random(soak_seed())
    num_lost = 0
    for _ in range(NUM_FLIPS):
        bit = drawn.randrange(8 * end)
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        memory.pool.zero_()
        with opened(tmp_path, memory) as tier:
            found = dict(tier.found)
            num_there = 0
            for copy, block in zip(copies, kept, strict=True):
                if found.get(copy.block_hash) == copy.slot and tier.load([copy]).result():
                    assert content(memory, copy.block_id) == [block]
                    num_there += 1
        num_lost += 8 - num_there
        for other in set(tmp_path.glob("*.slab")) - {file}:  # in place of one whose header was damaged
            other.unlink()
    assert num_lost >= NUM_FLIPS // 4, "few of the bits mattered"
    memory.close()


def test_a_damaged_entry_is_no_entry(tmp_path: Path) -> None:
    """Law 3: any bit of it: neither its content, nor that of another hash, nor another place in the order."""
    header = SlabHeader(MODEL, LAYOUT, 2)
    slab = Slab.create(tmp_path / "kv-0000.slab", header)
    slab.write(1, SlabEntry(hash_of(1), 5, 7), memoryview(bytes(LAYOUT.block_bytes)))
    assert list(slab.entries()) == [(1, (hash_of(1), 5, 7))]
    slab.close()
    (file,) = tmp_path.glob("*.slab")
    whole = file.read_bytes()
    place = whole.index(hash_of(1))
    for bit in range(8 * place, 8 * (place + 40)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        slab = Slab.open(file)
        assert list(slab.entries()) == []
        slab.close()


def test_a_block_that_is_damaged_while_the_tier_is_open_is_noticed(tmp_path: Path) -> None:
    memory = pool_of()
    with opened(tmp_path, memory) as tier:
        copies = stored_copies(tier, range(1, 5))
        (file,) = tmp_path.glob("*.slab")
        place = file.read_bytes().index(content(memory, 3)[0])
        with file.open("r+b") as stream:
            stream.seek(place + 5)
            byte = stream.read(1)[0]
            stream.seek(place + 5)
            stream.write(bytes([byte ^ 1]))
        assert tier.load(copies).result() == 2
        os.truncate(file, place)
        assert tier.load(copies).result() == 2
        assert not tier.is_off
    memory.close()


def test_the_right_bytes_of_another_block_are_damage(tmp_path: Path) -> None:
    memory = pool_of()
    with opened(tmp_path, memory) as tier:
        stored_copies(tier, range(1, 2))
        assert tier.load([BlockCopy(2, 0, hash_of(2))]).result() == 0
    memory.close()


def test_files_of_another_model_or_layout_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = pool_of()
    (tmp_path / "notes.slab").write_text("not ours")
    with opened(tmp_path, memory, model="other@bfloat16") as tier:
        stored_copies(tier, range(1, 4))
    before = {file: file.read_bytes() for file in tmp_path.glob("*.slab")}
    caplog.clear()
    with opened(tmp_path, memory) as tier:
        assert tier.found == []
        stored_copies(tier, range(1, 3))
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 2
    assert "kv-0000.slab is not used, and not changed: it has KV of model other@bfloat16" in lines[0]
    assert "notes.slab is not used, and not changed: it is no file of a KV tier" in lines[1]
    assert {file: file.read_bytes() for file in before} == before
    with opened(tmp_path, memory, model="other@bfloat16") as tier:
        assert len(tier.found) == 3
    memory.close()


def test_a_file_of_an_earlier_version_belongs_to_one_rank() -> None:
    """Its header names no ranks."""
    encoded = SlabHeader(MODEL, LAYOUT, 5).encode()
    start = encoded.index(b"{")
    fields = msgspec.json.decode(encoded[start:].rstrip(b"\0"))
    del fields["rank"], fields["num_ranks"]
    text = msgspec.json.encode(fields)
    check, length = xxhash.xxh3_64_intdigest(text), len(text)
    earlier = encoded[: start - 12] + struct.pack("<QI", check, length) + text
    assert SlabHeader.decode(earlier.ljust(4096, b"\0")) == SlabHeader(MODEL, LAYOUT, 5, rank=0, num_ranks=1)


def test_dropped_content_does_not_come_back(tmp_path: Path) -> None:
    """Law 1: what was corrupt, or computed with former weights, is not in the files either."""
    memory = pool_of()
    with opened(tmp_path, memory) as tier:
        stored_copies(tier, range(1, 4))
        tier.forget([1])
    with opened(tmp_path, memory) as tier:
        assert tier.found == [(hash_of(1), 0), (hash_of(3), 2)]
        tier.restart("newer@bfloat16")
        stored_copies(tier, range(5, 6))
    with opened(tmp_path, memory, model="newer@bfloat16") as tier:
        assert tier.found == [(hash_of(5), 4)]
    memory.close()


def test_one_engine_at_a_time_uses_a_folder(tmp_path: Path) -> None:
    memory = pool_of()
    with opened(tmp_path, memory):
        with pytest.raises(SettingError, match=r"disk_kv_dir is .*, which another engine uses") as error:
            DiskTier(memory, tmp_path, ROOM, MODEL)
        assert error.value.param == "disk_kv_dir"
    with opened(tmp_path, memory) as tier:
        assert tier.num_slots
    memory.close()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    memory = pool_of()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SettingError, match=r"disk_kv_dir is .*/file, which cannot be used \(File exists\)"):
        DiskTier(memory, file, ROOM, MODEL)
    with pytest.raises(SettingError, match=r"disk_kv_bytes is 5 bytes, and a file with one block has 8960"):
        DiskTier(memory, tmp_path, 5, MODEL)
    with pytest.raises(SettingError, match=r"disk_kv_bytes is \d+, of which \d+ bytes are not on the disk"):
        DiskTier(memory, tmp_path, 2**60, MODEL)
    assert list(tmp_path.glob("*.slab")) == []
    memory.close()


def test_a_smaller_size_does_without_files_that_are_too_large(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = pool_of()
    with opened(tmp_path, memory) as tier:
        stored_copies(tier, range(1, 4))
        num_slots = tier.num_slots
    with opened(tmp_path, memory, num_bytes=ROOM // 2) as tier:
        assert tier.found == [] and 0 < tier.num_slots < num_slots
    assert "disk_kv_bytes (32768)" in caplog.text
    with opened(tmp_path, memory, num_bytes=2 * ROOM) as tier:
        assert len(tier.found) == 3 and tier.num_slots > 1.8 * num_slots
    memory.close()


def test_a_disk_that_fails_turns_the_tier_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing fails but the copies: the tokens are computed."""
    memory = pool_of()
    with opened(tmp_path, memory) as tier:
        copies = stored_copies(tier, range(1, 2))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # every write fails, as on a full disk
        try:
            assert tier.store([BlockCopy(2, 1, hash_of(2))]).result() == 0
            assert tier.is_off
            assert tier.store([BlockCopy(3, 2, hash_of(3))]).result() == 0
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert tier.load(copies).result() == 0
        assert tier.settle()
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 1 and "is off until the next start" in warnings[0]
    with opened(tmp_path, memory) as tier:
        assert tier.found == [(hash_of(1), 0)]
    memory.close()


_WRITE_FOR_EVER = """
import sys
from pathlib import Path
from tests.engine_compute.test_disk_tier import MODEL, ROOM, hash_of, pool_of
from engine.kv_tiers.disk import DiskTier
from engine.kv_tiers.storage import BlockCopy

memory = pool_of()
tier = DiskTier(memory, Path(sys.argv[1]), ROOM, MODEL)
number = 0
while True:
    copies = [BlockCopy(1 + (number + place) % 8, (number + place) % tier.num_slots, hash_of(1 + (number + place) % 8))
              for place in range(8)]
    tier.store(copies).result()
    number += 8
    if number == 400:
        print("writing", flush=True)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_leaves_a_tier_that_opens(tmp_path: Path) -> None:
    """Content that was written is right, and what was half written is not found."""
    memory = pool_of()
    command = [sys.executable, "-c", _WRITE_FOR_EVER, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        writer.kill()
    kept = dict(zip(map(hash_of, range(1, 9)), content(memory, *range(1, 9)), strict=True))
    with opened(tmp_path, memory) as tier:
        assert len(tier.found) >= tier.num_slots - 1
        for one, slot in tier.found:
            memory.pool.zero_()
            assert tier.load([BlockCopy(1, slot, one)]).result() == 1
            assert content(memory, 1) == [kept[one]]
    memory.close()


def test_a_file_that_was_not_finished_is_no_slab(tmp_path: Path) -> None:
    """A process that is killed while it creates a file leaves one that the next start makes anew."""
    memory = pool_of()
    (tmp_path / "kv-0000.new").write_bytes(b"kvbaton")
    with opened(tmp_path, memory) as tier:
        assert tier.num_slots
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ""] == ["kv-0000.slab"]
    memory.close()


def test_a_header_of_another_version_is_not_read(tmp_path: Path) -> None:
    header = SlabHeader(MODEL, LAYOUT, 4, version=2)
    Slab.create(tmp_path / "kv-0000.slab", header).close()
    memory = pool_of()
    with opened(tmp_path, memory) as tier:
        assert len(list(tmp_path.glob("*.slab"))) == 2 and tier.num_slots > 20
    memory.close()
