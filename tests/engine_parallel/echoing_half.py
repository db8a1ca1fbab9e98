"""A rank's half of a connector that says on its line what it was told, and the other end, as an executor joins it."""

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from engine.connector import KVMemory


def open_half(settings: bytes, line: socket.socket) -> "EchoingHalf":
    """An opener."""
    return EchoingHalf(settings.decode(), line)


class EchoingHalf:
    """Fulfils ``RankConnector``."""

    def __init__(self, name: str, line: socket.socket) -> None:
        self._name, self._line = name, line

    def start(self, memory: KVMemory) -> None:
        """Say who started, where."""
        self._say("start", memory.num_blocks, os.getpid())

    def execute(self, metadata: Any) -> None:
        """Say what was ordered."""
        self._say("execute", metadata)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Nothing that counts."""
        return {"never told"}, set()

    def close(self) -> None:
        """Say so, and hang up."""
        self._say("close")
        self._line.close()

    def _say(self, *words: Any) -> None:
        self._line.sendall(json.dumps([self._name, *words]).encode() + b"\n")


class EchoingRanks:
    """Fulfils ``RanksConnector``. said: what each rank has said, when ``begin`` or ``hear`` was called or it has ended."""

    opener = "tests.engine_parallel.echoing_half:open_half"

    def __init__(self) -> None:
        self.said: list[list[Any]] = []
        self._lines: list[Any] = []

    def settings_of(self, rank: int) -> bytes:
        """Its name."""
        return f"half {rank}".encode()

    def connect(self, lines: Sequence[socket.socket]) -> None:
        """Keep them."""
        for line in lines:
            line.settimeout(60)
            self._lines.append(line.makefile("r"))
            line.close()

    def begin(self) -> None:
        """Every rank has started."""
        self.hear()

    def hear(self) -> None:
        """The next words of each."""
        self.said += [json.loads(line.readline()) for line in self._lines]

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Of all ranks."""
        return {"sent"}, set()

    def close(self) -> None:
        """Hear the last words."""
        for line in self._lines:
            self.said += [json.loads(words) for words in line.readlines()]
            line.close()
        self._lines = []
