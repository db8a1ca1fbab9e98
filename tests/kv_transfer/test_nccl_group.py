"""Groups of two by NCCL, played: their stream, their deadline, and what they leave of the environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from contract.errors import PeerUnreachableError
from kv_transfer.protocol.reads import PeerSilentError
from kv_transfer.transports.nccl import group as nccl
from kv_transfer.transports.nccl.group import SENDER, PairGroup
from kv_transfer.transports.transport import TransportSettings

ENVIRONMENT = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


class PlayedCuda:
    """Streams by number. current: that of this thread; 0 is the engine's."""

    def __init__(self) -> None:
        self.num_streams = self.current = 0

    def Stream(self, place: torch.device) -> int:  # noqa: N802 - torch's name
        self.num_streams += 1
        return self.num_streams

    @contextmanager
    def stream(self, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


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


class PlayedNccl:
    """The library: what was called on which stream. environment: as it was when the group was made."""

    def __init__(self, cuda: PlayedCuda) -> None:
        self.cuda, self.log = cuda, list[tuple[str, int]]()
        self.num_asks, self.error = 0.0, ""
        self.environment: list[str | None] = []

    class Options:
        """The options of a group."""

        _timeout: Any = None

    def __call__(self, store: object, rank: int, size: int, options: "PlayedNccl.Options") -> "PlayedNccl":
        self.environment = [os.environ.get(name) for name in ENVIRONMENT]  # noqa: TID251 - what NCCL reads
        return self

    def send(self, contents: list[torch.Tensor], other: int, tag: int) -> PlayedWork:
        self.log.append(("send", self.cuda.current))
        return PlayedWork(self, self.num_asks)

    def recv(self, contents: list[torch.Tensor], other: int, tag: int) -> PlayedWork:
        self.log.append(("recv", self.cuda.current))
        return PlayedWork(self, self.num_asks)

    def abort(self) -> None:
        self.log.append(("abort", self.cuda.current))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> PlayedNccl:
    cuda = PlayedCuda()
    played = PlayedNccl(cuda)
    monkeypatch.setattr(nccl, "_cuda", cuda)
    monkeypatch.setattr(nccl._distributed, "ProcessGroupNCCL", played, raising=False)
    return played


def group_of(timeout_seconds: float = 30.0) -> PairGroup:
    settings = TransportSettings(boot_id="b", read_timeout_seconds=timeout_seconds)
    return PairGroup("nccl", nccl._distributed.HashStore(), SENDER, settings, torch.device("cpu"))


def test_bytes_are_moved_on_a_stream_of_the_groups_own(library: PlayedNccl) -> None:
    """The engine's stream never waits for a peer, and two peers do not wait for each other."""
    first, second = group_of(), group_of()
    library.num_asks = 3
    first.send(torch.zeros(4, dtype=torch.uint8))
    assert len(second.receive(4)) == 4
    assert library.log == [("send", 1), ("waited", 1), ("recv", 2), ("waited", 2)]
    assert library.cuda.current == 0


def test_a_peer_that_never_comes_is_waited_for_by_the_host(library: PlayedNccl) -> None:
    """NCCL's own time-out would let the thread hang in the next copy: the group is aborted instead."""
    group = group_of(timeout_seconds=0.05)
    library.num_asks = float("inf")
    with pytest.raises(PeerSilentError, match=r"nothing was moved in 0\.05 s"):
        group.receive(4)
    assert library.log == [("recv", 1), ("abort", 1)]
    group.close()
    assert library.log[2:] == []


def test_a_peer_that_has_died_is_one_error(library: PlayedNccl) -> None:
    group = group_of()
    library.error = "NCCL communicator was aborted\nwith a long text"
    with pytest.raises(PeerUnreachableError, match=r"has failed: NCCL communicator was aborted$") as raised:
        group.send(torch.zeros(4, dtype=torch.uint8))
    assert not isinstance(raised.value, PeerSilentError)
    assert library.log[-1] == ("abort", 1)


def test_a_dead_peer_does_not_end_the_process(library: PlayedNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads its error mode when a group is made; the groups of the engine's ranks keep theirs."""
    monkeypatch.setenv(ENVIRONMENT[0], "3")
    monkeypatch.delenv(ENVIRONMENT[1], raising=False)
    group_of()
    assert library.environment == ["0", "0"]
    assert [os.environ.get(name) for name in ENVIRONMENT] == ["3", None]  # noqa: TID251 - what NCCL reads
