"""Hand-overs between workers that cut or store their KV differently: real connectors, torch-free pools."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from contract.identity import Role
from contract.layout import KVLayout, Side
from contract.requests import EngineRequest
from kv_transfer.counters import Counters
from kv_transfer.data.converting import Converter, HostStaging
from kv_transfer.protocol.orders import Conversion
from kv_transfer.protocol.plan import TransferPlan
from kv_transfer.protocol.reads import Read, ReadRequest, Source
from kv_transfer.transports.transport import ReceiverTransport
from tests.kv_transfer.builders import LAYOUT, TOKENS, Pair, settings_for, worker
from tests.kv_transfer.fakes import ByteMemory, CorruptingReceiver, GatedMemory
from tests.kv_transfer.test_plan_converting import as_bytes, cut, prompt_kv

WIDE = msgspec.structs.replace(LAYOUT, block_size=8)
HALF = msgspec.structs.replace(LAYOUT, dtype="bfloat16")
WIDE_HALF = msgspec.structs.replace(WIDE, dtype="bfloat16")
WAYS = pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (LAYOUT, WIDE),
        (WIDE, LAYOUT),
        (HALF, LAYOUT),
        (LAYOUT, HALF),
        (WIDE_HALF, LAYOUT),
        (LAYOUT, WIDE_HALF),
    ],
    ids=["merged", "split", "widened", "rounded", "split and widened", "merged and rounded"],
)
NUM_TOKENS = 29
"""Eight blocks of 4, four of 8; the last one partly filled in both."""
OLD = b"\x5a"


class MeasuringReceiver(CorruptingReceiver):
    """Records the bytes of each read."""

    def __init__(self, inner: ReceiverTransport, sizes: list[int]) -> None:
        super().__init__(inner, block_index=-1)
        self._sizes = sizes

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Record, and fetch."""
        self._sizes.append(sum(view.nbytes for view in views))
        super().fetch(source, request, views, read)


@dataclass
class Unequal:
    """A pair whose sides differ, and one prompt: its blocks on the sender (``source``) and on the receiver (``target``)."""

    pair: Pair
    plan: TransferPlan
    kv: Tensor
    source: list[int]
    target: list[int]
    send: EngineRequest
    fetch: EngineRequest

    def compute(self) -> None:
        """Write the prompt's KV into the sender's pool."""
        blocks = cut(self.kv, self.plan.theirs, 0, 0, len(self.source))
        for block_id, block in zip(self.source, blocks, strict=True):
            self.pair.prefill.driver.memory.write_view(block_id)[:] = as_bytes(block)

    def reserve(self, num_cached: int = 0) -> None:
        """Reserve our blocks, which hold old bytes, after the first range is published."""
        decode = self.pair.decode.driver
        decode.wait_for(lambda: decode.published == [self.fetch.key], "published")
        for block_id in self.target:
            decode.memory.fill(block_id, OLD)
        decode.receiver.receive_into(self.fetch.key, self.target, num_cached)

    def holds_old(self, block: int) -> bool:
        return set(bytes(self.pair.decode.driver.memory.read_view(self.target[block]))) == set(OLD)

    def found(self, first: int) -> list[Tensor]:
        """Return our blocks from ``first`` on, up to the prompt's end."""
        ours, memory = self.plan.ours.layout, self.pair.decode.driver.memory
        shape = (ours.num_layers, 2, ours.num_kv_heads, ours.block_size, ours.head_dim)
        blocks = []
        for index in range(first, len(self.target)):
            flat = torch.frombuffer(memory.write_view(self.target[index]), dtype=getattr(torch, ours.dtype))
            blocks.append(flat.view(shape)[:, :, :, : NUM_TOKENS - index * ours.block_size].clone())
        return blocks

    def expected(self, first: int) -> list[Tensor]:
        ours = self.plan.ours.layout
        kv = self.kv.to(getattr(torch, ours.dtype))
        starts = range(first * ours.block_size, NUM_TOKENS, ours.block_size)
        return [kv[:, :, :, start : start + ours.block_size] for start in starts]


@contextmanager
def unequal(theirs: KVLayout, ours: KVLayout, transport: str = "tcp", **decode: Any) -> Iterator[Unequal]:
    plan = TransferPlan(Side(ours), Side(theirs))
    with ExitStack() as stack:
        prefill = stack.enter_context(
            worker(
                settings_for("p", Role.PREFILL, transport=transport),
                theirs,
                f"w@{theirs.dtype}",
                memory=GatedMemory(theirs, 64),
            )
        )
        decoder = worker(
            settings_for("d", Role.DECODE, transport=transport, **decode), ours, f"w@{ours.dtype}"
        )
        pair = Pair(prefill, stack.enter_context(decoder))
        prompt = list(range(NUM_TOKENS))
        source = list(range(10, 10 + plan.theirs.num_blocks(NUM_TOKENS)))[::-1]
        target = list(range(30, 30 + plan.ours.num_blocks(NUM_TOKENS)))[::-1]
        legs = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        yield Unequal(pair, plan, prompt_kv(plan, NUM_TOKENS), source, target, *legs)


@WAYS
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("num_cached", [0, 1, 3])
def test_a_prompt_arrives_as_it_was_computed(
    theirs: KVLayout, ours: KVLayout, transport: str, num_cached: int
) -> None:
    """Chunk by chunk, from any first block on; cached blocks and their sources are left alone; nothing stays staged."""
    with unequal(theirs, ours, transport) as case:
        prefill, decode = case.pair.prefill.driver, case.pair.decode.driver
        case.compute()
        prefill.sender.open_send(case.send, case.source, 0)
        decode.receiver.start_fetch(case.fetch)
        for num_computed in (5, 9, 17):
            prefill.sender.publish(case.send.key, num_computed)
            prefill.step()
        case.reserve(num_cached)
        prefill.sender.publish(case.send.key, NUM_TOKENS)
        prefill.step()
        prefill.sender.finish_send(case.send.key, TOKENS)
        decode.wait_for(lambda: decode.received == [case.fetch.key], "received")
        received = decode.receiver.pop_received(case.fetch.key)
        assert all(
            torch.equal(found, expected)
            for found, expected in zip(case.found(num_cached), case.expected(num_cached), strict=True)
        )
        assert all(case.holds_old(block) for block in range(num_cached))
        crossed = len(case.plan.source_blocks(num_cached, len(case.target), NUM_TOKENS))
        num_blocks = case.pair.decode.count(f"transfer_blocks_total{{transport={transport}}}")
        assert received.report.num_bytes == num_blocks * theirs.block_bytes
        assert crossed <= num_blocks <= crossed + 1, "a block may be needed by two ranges"
        assert decode.memory.committed == case.target[num_cached:]
        assert case.pair.decode.count("transfer_converted_blocks_total") == len(case.target) - num_cached
        assert case.pair.decode.count("transfer_staging_bytes") == 0
        prefill.wait_for(lambda: prefill.sent == [case.send.key], "sent")


@WAYS
def test_no_block_of_ours_comes_out_of_a_damaged_one(theirs: KVLayout, ours: KVLayout) -> None:
    """Digests are compared before anything is converted: the damaged block is named, ours hold what they held."""
    damaged = -(-NUM_TOKENS // theirs.block_size) - 1
    with unequal(theirs, ours, decorate=partial(CorruptingReceiver, block_index=damaged)) as case:
        decode = case.pair.decode.driver
        case.compute()
        case.pair.prefill.driver.send_all(case.send, case.source, TOKENS)
        decode.receiver.start_fetch(case.fetch)
        case.reserve()
        decode.wait_for(lambda: decode.failed, "failed")
        assert decode.failed[case.fetch.key].kind == "transfer_failed"
        assert f"block {damaged} of transfer t-r" in decode.failed[case.fetch.key].message
        assert all(case.holds_old(block) for block in range(len(case.target)))
        assert (decode.memory.committed, decode.received) == ([], [])
        assert case.pair.decode.count("transfer_digest_mismatches_total") == 2, "read twice"
        assert case.pair.decode.count("transfer_staging_bytes") == 0


@WAYS
def test_staging_is_bounded(theirs: KVLayout, ours: KVLayout) -> None:
    """With room for two of their blocks the prompt crosses in as many pieces as that takes."""
    most, sizes = 2 * theirs.block_bytes, list[int]()
    measuring = partial(MeasuringReceiver, sizes=sizes)
    with unequal(theirs, ours, max_staging_bytes=most, decorate=measuring) as case:
        decode = case.pair.decode.driver
        case.compute()
        case.pair.prefill.driver.send_all(case.send, case.source, TOKENS)
        decode.receiver.start_fetch(case.fetch)
        case.reserve()
        decode.wait_for(lambda: decode.received == [case.fetch.key], "received")
        assert all(
            torch.equal(found, expected)
            for found, expected in zip(case.found(0), case.expected(0), strict=True)
        )
        assert max(sizes) == most
        assert sum(sizes) == len(case.source) * theirs.block_bytes


def test_a_buffer_holds_the_largest_piece_and_is_counted_while_it_is_lent() -> None:
    """Two of their blocks fit, or four if one of ours needs four."""
    counters, plan = Counters(), TransferPlan(Side(LAYOUT), Side(HALF))
    quarter = TransferPlan(Side(msgspec.structs.replace(LAYOUT, block_size=16)), Side(LAYOUT))
    for conversion, num_bytes in (
        (Conversion(plan, 1, 8, NUM_TOKENS), 2 * HALF.block_bytes),
        (Conversion(quarter, 0, 2, NUM_TOKENS), 4 * LAYOUT.block_bytes),
    ):
        converter = Converter(counters, 2 * HALF.block_bytes, lambda *_: None)
        converter.start(ByteMemory(LAYOUT, 1))
        with converter.staging(Source("p", "boot", "", "token"), conversion) as staging:
            assert isinstance(staging, HostStaging)
            assert staging.num_bytes == counters.snapshot()["transfer_staging_bytes"] == num_bytes
        assert counters.snapshot()["transfer_staging_bytes"] == 0


@WAYS
def test_a_fetch_that_is_cancelled_while_it_reads_drains(theirs: KVLayout, ours: KVLayout) -> None:
    """The blocks stay quarantined until the read into staging is terminal; nothing is converted after that."""
    with unequal(theirs, ours) as case:
        prefill, decode = case.pair.prefill.driver, case.pair.decode.driver
        memory = case.pair.prefill.driver.memory
        assert isinstance(memory, GatedMemory)
        case.compute()
        prefill.send_all(case.send, case.source, TOKENS)
        decode.receiver.start_fetch(case.fetch)
        decode.wait_for(lambda: decode.published == [case.fetch.key], "published")
        memory.gate_after_digest(case.source[-1], prefill)
        case.reserve()
        assert memory.is_waiting.wait(30)
        assert decode.receiver.cancel_fetch(case.fetch.key) is False
        decode.wait_for(lambda: decode.drained == [case.fetch.key], "drained")
        memory.gate.set()
        assert all(case.holds_old(block) for block in range(len(case.target)))
        prefill.wait_for(lambda: prefill.sent == [case.send.key], "sent")
        assert case.pair.decode.count("transfer_staging_bytes") == 0


@pytest.mark.parametrize("theirs", [WIDE, HALF])
def test_the_right_bytes_of_another_prompt_fail(theirs: KVLayout) -> None:
    """The receiver seeds digests as the sender does: by its block size and its fingerprint, over its own prompt."""
    with unequal(theirs, LAYOUT) as case:
        decode = case.pair.decode.driver
        case.compute()
        case.pair.prefill.driver.send_all(case.send, case.source, TOKENS)
        fetch = msgspec.structs.replace(case.fetch, prompt_token_ids=[*range(NUM_TOKENS - 1), 99])
        decode.receiver.start_fetch(fetch)
        case.reserve()
        decode.wait_for(lambda: decode.failed, "failed")
        assert f"block {len(case.source) - 1} of transfer t-r" in decode.failed[fetch.key].message


def test_a_shorter_prompt_there_is_refused() -> None:
    with unequal(WIDE, LAYOUT) as case:
        decode = case.pair.decode.driver
        short = case.pair.send_request("r", list(range(8)))
        case.pair.prefill.driver.send_all(short, [10], TOKENS)
        decode.receiver.start_fetch(case.fetch)
        decode.wait_for(lambda: decode.failed, "failed")
        message = decode.failed[case.fetch.key].message
        assert "ended with 1 blocks, 1 announced; the prompt has 4 blocks there" in message


def test_conversion_is_visible() -> None:
    """Law 10: a link over which KV is converted is counted; one without is not."""
    for theirs, converting in ((WIDE_HALF, 1), (LAYOUT, 0)):
        with unequal(theirs, LAYOUT) as case:
            case.pair.prefill.driver.send_all(case.send, case.source, TOKENS)
            case.pair.decode.driver.receiver.start_fetch(case.fetch)
            case.reserve()
            assert case.pair.decode.count("transfer_converting_links_total") == converting
