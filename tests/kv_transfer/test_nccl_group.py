"""Groups of two by NCCL, played: their stream, their deadline, and what they leave of the environment."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as torch_distributed

from contract.errors import PeerUnreachableError
from kv_transfer.protocol.reads import PeerSilentError
from kv_transfer.transports.nccl.group import RECEIVER, SENDER, GroupLibrary, PairGroup
from kv_transfer.transports.transport import TransportSettings

distributed: Any = torch_distributed
ENVIRONMENT = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


class PlayedCuda:
    """Streams by number. current: that of this thread; 0 is the engine's."""

    def __init__(self) -> None:
        self.num_streams = 0
        self._here = threading.local()

    @property
    def current(self) -> int:
        return getattr(self._here, "stream", 0)

    def mem_get_info(self, place: torch.device) -> tuple[int, int]:
        return 7 * 2**20, 9 * 2**20

    def Stream(self, place: torch.device) -> int:  # noqa: N802 - torch's name
        self.num_streams += 1
        return self.num_streams

    @contextmanager
    def stream(self, stream: int) -> Iterator[None]:
        before, self._here.stream = self.current, stream
        yield
        self._here.stream = before


class PlayedWork:
    """A move that the GPU has done when it was asked ``num_asks`` times; NCCL's own wait does not wait for that."""

    def __init__(self, played: "PlayedNccl", num_asks: float) -> None:
        self._played, self._left = played, num_asks

    def is_completed(self) -> bool:
        self._left -= 1
        return self._left < 0

    def wait(self, timeout: object) -> None:
        self._played.log.append(("waited", self._played.cuda.current))
        assert self._left < 0, "the stream would wait for the peer, and the thread for the stream"
        if self._played.error:
            raise RuntimeError(self._played.error)


class Config:
    """NCCL's own options of a group."""

    blocking = 1


class Options:
    """The options of a group."""

    _timeout: Any = None

    def __init__(self) -> None:
        self.config = Config()


class PlayedNccl:
    """The library: what was called on which stream. environment: as it was when the group was made.

    joins: False for a peer that has died: the first move does not return before the group is aborted. error: of later moves.
    """

    def __init__(self) -> None:
        self.cuda, self.log = PlayedCuda(), list[tuple[str, int]]()
        self.num_asks, self.error = 0.0, ""
        self.environment: list[str | None] = []
        self.joins = True
        self.is_aborted, self.is_forming = threading.Event(), True

    def make(self, store: object, rank: int, size: int, options: Options) -> "PlayedNccl":
        self.environment = [os.environ.get(name) for name in ENVIRONMENT]  # noqa: TID251 - what NCCL reads
        assert options.config.blocking == 0, "a blocking communicator cannot be aborted while it is formed"
        return self

    def send(self, contents: list[torch.Tensor], other: int, tag: int) -> PlayedWork:
        return self._move("send", contents)

    def recv(self, contents: list[torch.Tensor], other: int, tag: int) -> PlayedWork:
        return self._move("recv", contents)

    def abort(self) -> None:
        self.is_aborted.set()
        self.log.append(("abort", 0))

    def group(self, timeout_seconds: float = 30.0, rank: int = SENDER) -> PairGroup:
        """Return a group that is formed, and forget what that took."""
        nccl = SimpleNamespace(PrefixStore=distributed.PrefixStore, ProcessGroupNCCL=Made(self.make))
        settings = TransportSettings(boot_id="b", read_timeout_seconds=timeout_seconds)
        library = GroupLibrary(nccl, self.cuda)
        self.is_forming = True
        made = PairGroup("nccl", distributed.HashStore(), rank, settings, torch.device("cpu"), library)
        self.log.clear()
        self.is_forming = False
        return made

    def _move(self, name: str, contents: list[torch.Tensor]) -> PlayedWork:
        self.log.append((name, self.cuda.current))
        if self.is_forming:
            assert contents[0].nbytes == 1 and threading.current_thread() is not threading.main_thread()
            if not self.joins:
                assert self.is_aborted.wait(30)
                raise RuntimeError("the communicator was aborted")
        return PlayedWork(self, self.num_asks)


class Made:
    """torch's class of groups."""

    Options = Options

    def __init__(self, make: Callable[..., PlayedNccl]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> PlayedNccl:
        return self._make(*arguments)


@pytest.fixture
def library() -> PlayedNccl:
    return PlayedNccl()


@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
def test_a_peer_that_dies_before_it_joins_is_given_up_in_time(library: PlayedNccl, rank: int) -> None:
    """NCCL forms its communicator within the first move, which has no deadline of its own."""
    library.joins = False
    with pytest.raises(PeerSilentError, match=r"could not be formed: the peer has not joined in 0\.05 s"):
        library.group(timeout_seconds=0.05, rank=rank)
    assert library.is_aborted.wait(30), "which ends the thread that still waits"


def test_a_communicator_that_cannot_be_formed_is_an_error(library: PlayedNccl) -> None:
    library.error = "unhandled system error"
    with pytest.raises(PeerUnreachableError, match="could not be formed: unhandled system error") as raised:
        library.group()
    assert not isinstance(raised.value, PeerSilentError) and library.is_aborted.wait(30)


def test_the_memory_of_a_group_is_logged(library: PlayedNccl, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        library.group()
    assert "a group of nccl takes 0 MiB on cpu, of which 7 MiB are free now" in caplog.text


def test_bytes_are_moved_on_a_stream_of_the_groups_own(library: PlayedNccl) -> None:
    """The engine's stream never waits for a peer, and two peers do not wait for each other."""
    first, second = library.group(), library.group()
    library.num_asks = 3
    first.send(torch.zeros(4, dtype=torch.uint8))
    assert len(second.receive(4)) == 4
    assert library.log == [("send", 1), ("waited", 1), ("recv", 2), ("waited", 2)]
    assert library.cuda.current == 0


def test_a_peer_that_never_comes_is_waited_for_by_the_host(library: PlayedNccl) -> None:
    """NCCL's own time-out would let the thread hang in the next copy: the group is aborted instead."""
    group = library.group(timeout_seconds=0.05)
    library.num_asks = float("inf")
    with pytest.raises(PeerSilentError, match=r"nothing was moved in 0\.05 s"):
        group.receive(4)
    assert library.log == [("recv", 1), ("abort", 0)]
    group.close()
    assert library.log[2:] == []


def test_a_peer_that_has_died_is_one_error(library: PlayedNccl) -> None:
    group = library.group()
    library.error = "NCCL communicator was aborted\nwith a long text"
    with pytest.raises(PeerUnreachableError, match=r"has failed: NCCL communicator was aborted$") as raised:
        group.send(torch.zeros(4, dtype=torch.uint8))
    assert not isinstance(raised.value, PeerSilentError)
    assert library.log[-1] == ("abort", 0)


def test_a_dead_peer_does_not_end_the_process(library: PlayedNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads its error mode when a group is made; the groups of the engine's ranks keep theirs."""
    monkeypatch.setenv(ENVIRONMENT[0], "3")
    monkeypatch.delenv(ENVIRONMENT[1], raising=False)
    library.group()
    assert library.environment == ["0", "0"]
    assert [os.environ.get(name) for name in ENVIRONMENT] == ["3", None]  # noqa: TID251 - what NCCL reads
