"""A group of two processes that moves bytes: NCCL between GPUs, gloo between host memories."""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from contract.errors import PeerUnreachableError, TransferError
from kv_transfer.links.framing import format_address, parse_address
from kv_transfer.links.listening import listen_on
from kv_transfer.protocol.reads import PeerSilentError

SENDER = 0
RECEIVER = 1
_TAG = 0


class Meeting:
    """The store at which one group meets; it listens on ``host`` only, and lives as long as the group."""

    def __init__(self, host: str, advertise_host: str | None, timeout_seconds: float) -> None:
        listener = listen_on(host, 0)
        port = listener.getsockname()[1]
        self.address = format_address(advertise_host or host, port)
        self.store = _distributed().TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
            master_listen_fd=listener.detach(),
        )


def join(address: str, timeout_seconds: float) -> Any:
    """The other one's store. Raises TransferError."""
    host, port = parse_address(address)
    try:
        return _distributed().TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds)
        )
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"the group's store at {address} cannot be reached: {error}") from error


class PairGroup:
    """One of two ranks. Blocks until both are there. Used by one thread; a call that fails ends the group.

    Raises PeerUnreachableError when the other one is gone or is silent for ``timeout_seconds``.
    """

    def __init__(self, backend: str, store: Any, rank: int, host: str, timeout_seconds: float) -> None:
        self._other, self._timeout = 1 - rank, timedelta(seconds=timeout_seconds)
        self._store = _distributed().PrefixStore("kv", store)
        self._group: Any = None
        begun = time.monotonic()
        try:
            self._group = self._make(backend, rank, host)
        except RuntimeError as error:
            raise self._failed(begun, f"no group of two came about: {error}") from error

    def send(self, content: torch.Tensor) -> None:
        """Send all of it."""
        self._wait(lambda: self._group.send([content], self._other, _TAG))

    def receive(self, content: torch.Tensor) -> None:
        """Fill all of it."""
        self._wait(lambda: self._group.recv([content], self._other, _TAG))

    def close(self) -> None:
        """End the group, and what the other one waits for. Idempotent."""
        group = self._group
        self._group = None
        if group is not None:
            group.abort()

    def _make(self, backend: str, rank: int, host: str) -> Any:
        makers = _distributed()
        if backend == "nccl":
            options = makers.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return makers.ProcessGroupNCCL(self._store, rank, 2, options)
        options = makers.ProcessGroupGloo._Options()
        options._devices = [makers.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = self._timeout
        return makers.ProcessGroupGloo(self._store, rank, 2, options)

    def _failed(self, begun: float, message: str) -> PeerUnreachableError:
        """The library has one error for everything: it was silence if the time is over."""
        is_over = time.monotonic() - begun >= self._timeout.total_seconds()
        return PeerSilentError(message) if is_over else PeerUnreachableError(message)

    def _wait(self, begin: Any) -> None:
        begun = time.monotonic()
        try:
            begin().wait(self._timeout)
        except RuntimeError as error:
            self.close()
            message = f"the group of two has failed: {str(error).splitlines()[0]}"
            raise self._failed(begun, message) from error


def _distributed() -> Any:
    """Torch's classes for one group without a default group, which its stubs leave out."""
    return dist
