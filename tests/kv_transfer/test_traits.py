"""The abilities of a receiver are data: one without any trait is a whole transport; no trait is read or offered in vain."""

import ast
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest

from contract.layout import KVLayout
from engine.mailbox import Mailbox
from kv_transfer.counters import Completions, Counters
from kv_transfer.data.data_half import DataHalf
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import Share, digest_of
from kv_transfer.protocol.orders import PullJob
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source
from kv_transfer.ranks.rank_data import RankReader
from kv_transfer.transports.choosing import Chooser
from kv_transfer.transports.transport import ReceiverTraits, Senders
from tests.kv_transfer.fakes import FlatPool

WAIT = 30.0
KV_TRANSFER = Path(__file__).parents[2] / "kv_transfer"
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=4, dtype="float32")
SOURCE = Source("p", "boot", "nowhere", "token", "plain")
TRAITS = {trait.name for trait in fields(ReceiverTraits)}


class PlainReceiver:
    """The receiver of a transport that can do nothing beyond reading: block i is bytes i. Records where it reads what."""

    traits = ReceiverTraits()

    def __init__(self) -> None:
        self.reads: list[tuple[str, int]] = []
        self.forgotten: list[Source] = []

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Copy the blocks."""
        self.reads.append((threading.current_thread().name, request.first_block))
        for number, view in enumerate(views, request.first_block):
            read.check()
            view[:] = bytes([number]) * len(view)

    def probe(self, source: Source, read: Read) -> None:
        """Find the source readable."""

    def forget(self, source: Source) -> None:
        """Record it."""
        self.forgotten.append(source)

    def close(self) -> None:
        """There is nothing to close."""


class Verified(Mailbox[str]):
    """The keys of the reads whose blocks were verified."""

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        """Record the end of a read."""
        assert not isinstance(event, ev.JobFailed), event
        if isinstance(event, ev.PieceVerified):
            self.put(key)

    def send_event(self, key: str, event: ev.SendEvent) -> None:
        """Nothing is lent."""

    def end_expected(self, key: str, seconds: float) -> None:
        """Nothing is lent."""

    def lease_idle(self, name: LeaseName) -> None:
        """Nothing is lent."""

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """Fail the test."""
        raise AssertionError(thread) from error


@contextmanager
def data_half(receiver: PlainReceiver, pool: FlatPool) -> Iterator[tuple[DataHalf, Verified]]:
    """A data half that reads over this receiver as over that of any transport."""
    chooser = Chooser(Counters())
    data = DataHalf(chooser, Counters(), Completions(), ["plain"])
    verified = Verified()
    data.attach(Senders({}), verified)
    chooser.start({"plain": RankReader(receiver, 0, 1, 1)}, data.post_pull)
    data.start(pool)
    try:
        yield data, verified
    finally:
        data.close()


def pull(key: str, first: int, count: int) -> PullJob:
    numbers = range(first, first + count)
    digests = tuple(digest_of(memoryview(bytes([number]) * LAYOUT.block_bytes), number) for number in numbers)
    name = LeaseName("t", 0, "lease")
    return PullJob(key, SOURCE, name, first, tuple(numbers), (Share(0, digests),), tuple(numbers), Read())


def do_nothing() -> None:
    """Stand for the call of a read that was queued."""


def test_a_transport_without_any_trait_moves_blocks() -> None:
    """It sends nothing ahead, and every read, however short, runs in the source's thread."""
    receiver, pool = PlainReceiver(), FlatPool(LAYOUT, 8)
    with data_half(receiver, pool) as (data, verified):
        for key, first, count in (("a", 1, 2), ("b", 3, 3), ("c", 6, 1)):
            # A call would have to be made, and the read would be missing in the source's thread below.
            (data.post_pull(pull(key, first, count)) or do_nothing)()
        assert [verified.get(WAIT) for _ in range(3)] == ["a", "b", "c"]
        data.leave(SOURCE)
    assert receiver.reads == [("kv-pull-p", 1), ("kv-pull-p", 3), ("kv-pull-p", 6)]
    assert receiver.forgotten == [SOURCE]
    assert [bytes(pool.read_view(number)) for number in range(1, 7)] == [
        bytes([number]) * LAYOUT.block_bytes for number in range(1, 7)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_stands_for_a_receiver_offers_no_more_than_it(num_ranks: int) -> None:
    receiver = PlainReceiver()
    chooser = Chooser(Counters())
    chooser.start({"plain": RankReader(receiver, 0, num_ranks, 2)}, lambda _job: None)
    assert not chooser.traits.is_at_hand(SOURCE)
    assert not chooser.traits.is_on_our_device(SOURCE)
    chooser.traits.ask(SOURCE, [])
    assert receiver.reads == []


def test_several_ranks_copy_nothing_at_once_from_memory_at_hand() -> None:
    receiver = PlainReceiver()
    receiver.traits = ReceiverTraits(is_at_hand=lambda _source: True)
    at_hand = [RankReader(receiver, 0, num_ranks, 2).traits.is_at_hand(SOURCE) for num_ranks in (1, 2)]
    assert at_hand == [True, False]


def uses(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield ("read", trait) for ``….traits.TRAIT``, and ("offered", trait) for ``ReceiverTraits(TRAIT=…)``."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Attribute(attr="traits"), attr=trait):
                yield "read", trait
            case ast.Call(func=ast.Name(id="ReceiverTraits"), keywords=keywords):
                yield from (("offered", str(keyword.arg)) for keyword in keywords)


def test_every_trait_is_read_and_is_offered_by_a_transport() -> None:
    """Without a reader a trait has no effect; without a transport that offers it, its reader is dead code."""
    read, offered = set[str](), set[str]()
    for path in KV_TRANSFER.rglob("*.py"):
        found = set(uses(ast.parse(path.read_text())))
        # What only forwards traits to those of other receivers neither uses nor offers them.
        if path.name not in ("choosing.py", "rank_data.py"):
            read |= {trait for how, trait in found if how == "read"}
        if path.parent.parent.name == "transports":
            offered |= {trait for how, trait in found if how == "offered"}
    assert read == offered == TRAITS


def test_no_capability_is_asked_for_by_isinstance() -> None:
    """A class that has a method by that name would offer it without having meant to."""
    product = [*KV_TRANSFER.rglob("*.py"), KV_TRANSFER.parent / "engine/connector.py"]
    asked = [
        path.name
        for path in product
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == "runtime_checkable"
    ]
    assert asked == []
