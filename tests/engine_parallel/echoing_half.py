"""A rank's half of a connector that reports its calls over its socket, and the other end, for tests of executors."""

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from engine.connector import KVMemory, RankConnector, RankConnectorPlan


def open_half(settings: bytes, sock: socket.socket) -> "EchoingHalf":
    """Open a half. The opener of a RankConnectorPlan."""
    return EchoingHalf(settings.decode(), sock)


class EchoingHalf:
    """A ``RankConnector`` that reports its calls."""

    def __init__(self, name: str, sock: socket.socket) -> None:
        self._name = name
        self._socket = sock

    def start(self, memory: KVMemory) -> None:
        """Report the pool and the process."""
        self._report("start", memory.num_blocks, os.getpid())

    def execute(self, metadata: Any) -> None:
        """Report the orders."""
        self._report("execute", metadata)

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return completions, which the executor must ignore."""
        return {"ignored"}, set()

    def close(self) -> None:
        """Report the call, and close the socket."""
        self._report("close")
        self._socket.close()

    def _report(self, *report: Any) -> None:
        self._socket.sendall(json.dumps([self._name, *report]).encode() + b"\n")


class EchoingRanks:
    """A ``RanksConnector``. reports: of each rank, as read by ``begin``, ``receive`` or ``close``."""

    opener = "tests.engine_parallel.echoing_half:open_half"

    def __init__(self) -> None:
        self.reports: list[list[Any]] = []
        self._sockets: list[Any] = []

    def in_process(self) -> RankConnector:
        """See RanksConnector."""
        raise NotImplementedError

    def connect(self, sockets: Sequence[socket.socket], peers: Sequence[int]) -> list[RankConnectorPlan]:
        """Keep the sockets. The settings of each half are its name."""
        for sock in sockets:
            sock.settimeout(60)
            self._sockets.append(sock.makefile("r"))
            sock.close()
        return [
            RankConnectorPlan(self.opener, f"half {rank}".encode(), peer) for rank, peer in enumerate(peers)
        ]

    def begin(self) -> None:
        """Receive the start report of each rank."""
        self.receive()

    def receive(self) -> None:
        """Receive the next report of each rank."""
        self.reports += [json.loads(sock.readline()) for sock in self._sockets]

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return completions on all ranks."""
        return {"sent"}, set()

    def close(self) -> None:
        """Receive the last reports."""
        for sock in self._sockets:
            self.reports += [json.loads(report) for report in sock.readlines()]
            sock.close()
        self._sockets = []
