"""The transport that two workers agree on: the choice is real, counted and logged."""

import logging
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from contract.errors import TransferError, UnavailableError
from contract.identity import Role
from contract.layout import Side
from kv_transfer.connector import TransferFactory
from kv_transfer.counters import Counters
from kv_transfer.protocol.handshake import Session
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.orders import PullJob
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source
from kv_transfer.transports.choosing import Chooser
from kv_transfer.transports.registry import open_transport
from kv_transfer.transports.shm import receiver
from kv_transfer.transports.transport import IdleTogether, ReceiverTraits
from tests.kv_transfer.builders import (
    LAYOUT,
    MODEL,
    Pair,
    Sides,
    hand_over,
    pair_of,
    prompt_of,
    settings_for,
    worker,
)
from tests.kv_transfer.fakes import ByteMemory, context_of
from tests.leftovers import Leftovers


def chosen(pair: Pair) -> dict[str, float]:
    """Return what the decode worker counted about its choices."""
    counters = pair.decode.driver.scheduler.counters()
    return {name: value for name, value in counters.items() if name.startswith("transfer_transport_chosen")}


def moved(pair: Pair) -> dict[str, float]:
    names = {name: f"transfer_blocks_total{{transport={name}}}" for name in ("shm", "tcp")}
    return {name: pair.decode.count(counter) for name, counter in names.items()}


def test_on_one_machine_it_is_shm(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kv_transfer")
    with pair_of(transport="auto") as pair:
        hand_over(pair, "r")
        hand_over(pair, "again")
        assert moved(pair) == {"shm": 6, "tcp": 0}
        assert chosen(pair) == {"transfer_transport_chosen_total{reason=probed,transport=shm}": 1}
    assert "worker p is read over shm: its probe succeeded" in caplog.text


def test_where_no_folder_is_shared_it_falls_back_to_tcp_which_is_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The address of the peer's socket does not exist here, like between two machines."""
    caplog.set_level(logging.INFO, "kv_transfer")
    folder = tmp_path / "p"
    with pair_of(Sides(prefill={"shm_dir": folder}), transport="auto") as pair:
        next(folder.iterdir()).unlink()
        hand_over(pair, "r")
        assert moved(pair) == {"shm": 0, "tcp": 3}
        assert chosen(pair) == {"transfer_transport_chosen_total{reason=fallback,transport=tcp}": 1}
    assert "worker p is read over tcp: shm failed: worker p does not answer at" in caplog.text


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [("auto", "tcp", "tcp"), ("tcp", "auto", "tcp"), ("auto", "shm", "shm"), ("shm", "auto", "shm")],
)
def test_a_forced_name_is_honoured_by_the_other_side(prefill: str, decode: str, expected: str) -> None:
    with pair_of(Sides(prefill={"transport": prefill}, decode={"transport": decode})) as pair:
        hand_over(pair, "r")
        assert pair.decode.count(f"transfer_blocks_total{{transport={expected}}}") == 3
        assert chosen(pair) == {f"transfer_transport_chosen_total{{reason=only,transport={expected}}}": 1}


def test_two_different_forced_names_are_refused() -> None:
    with pair_of(Sides(prefill={"transport": "tcp"}, decode={"transport": "shm"})) as pair:
        decode, fetch = pair.decode.driver, pair.fetch_request("r", prompt_of(2))
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: decode.failed, "failed")
        failed = decode.failed[fetch.key]
        assert failed.kind == "incompatible"
        assert "transport: ours is tcp, the peer's is shm" in failed.message


def test_a_pool_that_cannot_be_mapped_goes_over_tcp() -> None:
    """A pool on a device is not offered over shm at all."""
    memory = ByteMemory(LAYOUT, 64)
    memory.memfd = None
    with pair_of(transport="auto", memory=memory) as pair:
        hand_over(pair, "r")
        assert moved(pair) == {"shm": 0, "tcp": 3}
        assert chosen(pair) == {"transfer_transport_chosen_total{reason=only,transport=tcp}": 1}


def test_auto_does_without_shm_where_its_folder_will_not_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with pair_of(Sides(prefill={"shm_dir": tmp_path / "file"}), transport="auto") as pair:
        hand_over(pair, "r")
        assert moved(pair) == {"shm": 0, "tcp": 3}
    assert "transport auto leaves shm out" in caplog.text


@pytest.mark.parametrize("port", ["data_port", "control_port"])
def test_a_port_that_is_taken_leaves_nothing_open(port: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        changes: dict[str, Any] = {port: taken.getsockname()[1], "shm_dir": tmp_path, "transport": "auto"}
        leftovers = Leftovers()
        with pytest.raises(OSError, match="Address already in use"):
            TransferFactory(settings_for("p", Role.PREFILL, **changes))(Side(LAYOUT), MODEL, lambda: None)
        assert (leftovers.threads(), leftovers.descriptors()) == ([], set())
        assert list(tmp_path.iterdir()) == []


def test_a_transport_whose_receiver_cannot_be_opened_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("no copy loop")

    monkeypatch.setattr(receiver, "load_copy_blocks", fail)
    leftovers = Leftovers()
    with pytest.raises(OSError, match="no copy loop"):
        open_transport("shm", context_of("b", shm_dir=tmp_path))
    assert (leftovers.threads(), leftovers.descriptors()) == ([], set())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(("owner", "name"), [(socket, "socketpair"), (threading.Thread, "start")])
def test_a_data_port_that_cannot_be_opened_leaves_nothing_open(
    transport: str, owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has as many descriptors, or threads, as it may have."""

    def fail(*_: object) -> None:
        raise RuntimeError("no more")

    context = context_of("b", shm_dir=tmp_path)
    leftovers = Leftovers()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(RuntimeError, match="no more") as kept:  # with all that the failed call has opened
            open_transport(transport, context)
    assert kept.tb is not None
    assert leftovers.descriptors() == set()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_was_never_started_closes_everything(tmp_path: Path) -> None:
    with worker(settings_for("p", Role.PREFILL, transport="auto", shm_dir=tmp_path)):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_lease_is_idle_once_every_sender_says_so() -> None:
    """Once for each release, whichever sender is the last."""
    idle: list[LeaseName] = []
    name, other = LeaseName("t", 0, "a"), LeaseName("t", 0, "b")
    together = IdleTogether(("shm", "tcp"), idle.append)
    together.report("shm", name)
    together.report("shm", name)
    together.report("shm", other)
    assert idle == []
    together.report("tcp", name)
    assert idle == [name]
    together.report("tcp", name)
    together.report("tcp", other)
    assert idle == [name, name, other]


class Shelf:
    """A receiver that records its calls; a probe waits for ``gate`` and may fail then, or measure ``rate``."""

    traits = ReceiverTraits()

    def __init__(self, error: Exception | None = None, rate: float | None = None) -> None:
        self.gate, self.error, self.rate = threading.Event(), error, rate
        self.num_probes = 0
        self.forgotten: list[Source] = []

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        raise NotImplementedError

    def forget(self, source: Source) -> None:
        self.forgotten.append(source)

    def close(self) -> None:
        self.gate.set()

    def probe(self, source: Source, read: Read) -> float | None:
        self.num_probes += 1
        with suppress(TransferError), read.interruptible(self.gate.set):
            assert self.gate.wait(30)
        read.check()
        if self.error is not None:
            raise self.error
        return self.rate


SESSION = Session("p", "b", "prefill", 3.0, (Offer("tcp", "there:1"), Offer("shm", "/there")), "token")


def job_for(source: Source, first_block: int) -> PullJob:
    return PullJob("r", source, LeaseName("t", 0, "l"), first_block, (), (), (), Read())


@pytest.mark.parametrize(
    ("error", "expected"),
    [(None, "shm"), (TransferError("it is broken"), "tcp"), (OverflowError("a bug"), "tcp")],
    ids=["works", "fails", "has a bug"],
)
def test_reads_wait_for_the_choice_and_keep_their_order(error: Exception | None, expected: str) -> None:
    """P4: a bug in the thread of a trial left the reads waiting until the request's own time-out."""
    shm, tcp, posted, told = Shelf(error), Shelf(), list[PullJob](), threading.Event()
    chooser = Chooser(Counters())
    chooser.start({"shm": shm, "tcp": tcp}, posted.append)
    answers: list[tuple[Source, Source]] = []

    def hear(provisional: Source, chosen: Source) -> bool:
        answers.append((provisional, chosen))
        chooser.pull(job_for(provisional, 9))
        told.set()
        return True

    provisional = chooser.choose(SESSION, hear)
    for number in range(3):
        chooser.pull(job_for(provisional, number))
    assert posted == []
    shm.gate.set()
    assert told.wait(30)
    chooser.close()
    assert [(job.first_block, job.source.transport) for job in posted] == [
        (number, expected) for number in (0, 1, 2, 9)
    ]
    assert [(first.transport, then.transport) for first, then in answers] == [("shm", expected)]
    assert shm.forgotten == ([provisional] if error else [])


@pytest.mark.parametrize(
    ("nixl", "tcp", "expected"),
    [
        ((None, 0.5e9), (None, 2e9), "tcp"),
        ((None, 20e9), (None, 2e9), "nixl"),
        ((None, 0.5e9), (TransferError("no port"), None), "nixl"),
        ((None, 0.5e9), (None, None), "nixl"),
        ((TransferError("no library"), None), (None, 2e9), "tcp"),
    ],
    ids=["slow", "fast", "alone", "unmeasured", "broken"],
)
def test_what_is_fastest_is_chosen_not_what_is_named_first(
    nixl: tuple[Exception | None, float | None],
    tcp: tuple[Exception | None, float | None],
    expected: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A library may read from device to device, or copy through hosts by TCP: only a measurement shows it."""
    caplog.set_level(logging.INFO, "kv_transfer")
    shelves = {"shm": Shelf(TransferError("another machine")), "nixl": Shelf(*nixl), "tcp": Shelf(*tcp)}
    offers = tuple(Offer(name, "there:1") for name in shelves)
    for shelf in shelves.values():
        shelf.gate.set()
    chooser = Chooser(counters := Counters())
    chooser.start(shelves, lambda _: None)
    answers, told = list[Source](), threading.Event()

    def hear(_provisional: Source, chosen: Source) -> bool:
        answers.append(chosen)
        told.set()
        return True

    chooser.choose(replace(SESSION, offers=offers), hear)
    assert told.wait(30)
    chooser.close()
    (chosen,) = answers
    assert chosen.transport == expected
    assert (
        counters.snapshot()[f"transfer_transport_chosen_total{{reason=fallback,transport={expected}}}"] == 1
    )
    (state,) = chooser.alternatives.debug_state()
    assert state["transports"][0] == expected, "later transfers too"
    is_beaten = nixl[0] is None and expected == "tcp"
    assert ("nixl is slower (nixl 0.500 GB/s, tcp 2.000 GB/s)" in caplog.text) == is_beaten
    assert bool(shelves["nixl"].forgotten) == is_beaten, "what is not read keeps no connection"
    assert bool(shelves["tcp"].forgotten) == (nixl[1] == 20e9)


def test_a_transport_that_measures_nothing_is_not_compared() -> None:
    """Its speed is known from its name: no other one is tried."""
    shm, tcp, told = Shelf(), Shelf(rate=9e9), threading.Event()
    chooser = Chooser(Counters())
    chooser.start({"shm": shm, "tcp": tcp}, lambda _: None)
    shm.gate.set()

    def hear(_provisional: Source, _chosen: Source) -> bool:
        told.set()
        return True

    chooser.choose(SESSION, hear)
    assert told.wait(30)
    chooser.close()
    assert (shm.num_probes, tcp.num_probes) == (1, 0)


def test_a_choice_that_comes_too_late_is_forgotten() -> None:
    """The link went down while its transport was tried."""
    shm, tcp, is_forgotten = Shelf(), Shelf(), threading.Event()
    chooser = Chooser(counters := Counters())
    chooser.start({"shm": shm, "tcp": tcp}, lambda _: None)

    def refuse(_provisional: Source, _chosen: Source) -> bool:
        is_forgotten.set()
        return False

    provisional = chooser.choose(SESSION, refuse)
    chooser.forget(provisional)
    assert is_forgotten.wait(30)
    chooser.close()
    assert provisional in shm.forgotten
    assert {source.transport for source in tcp.forgotten} == {"tcp"}
    assert counters.snapshot() == {}


def test_a_choice_without_a_thread_to_probe_in_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has as many threads as it may have when a link comes up."""

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    chooser = Chooser(Counters())
    chooser.start({"shm": Shelf(), "tcp": Shelf()}, lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(UnavailableError, match="no thread can be started to probe worker p"):
            chooser.choose(SESSION, lambda _provisional, _chosen: True)
    assert chooser.alternatives.debug_state() == []
    chooser.close()


@pytest.mark.parametrize(
    ("error", "expected"), [(None, "shm"), (TransferError("it is broken"), "tcp")], ids=["works", "fails"]
)
def test_who_waits_for_the_choice_gets_it_whenever_it_is_made(error: Exception | None, expected: str) -> None:
    shm, tcp, told = Shelf(error), Shelf(), Queue[str]()
    chooser = Chooser(Counters())
    chooser.start({"shm": shm, "tcp": tcp}, lambda _: None)
    provisional = chooser.choose(SESSION, lambda _provisional, _chosen: True)
    chooser.when_chosen(provisional, lambda chosen: told.put(chosen.transport))
    assert told.empty()
    shm.gate.set()
    assert told.get(timeout=30) == expected
    chooser.when_chosen(provisional, lambda chosen: told.put(chosen.transport))
    assert told.get_nowait() == expected
    chooser.close()


def test_closing_ends_a_probe() -> None:
    shm, leftovers = Shelf(), Leftovers()
    chooser = Chooser(Counters())
    chooser.start({"shm": shm, "tcp": Shelf()}, lambda _: None)
    chooser.choose(SESSION, lambda _provisional, _chosen: False)
    chooser.close()
    assert leftovers.threads("kv-probe") == []
