"""A relay of control links that parses frames, so that tests can wait for, repeat and reorder them."""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from typing import Literal

import msgspec

from kv_transfer.links.framing import FrameBuffer, as_frame
from tests.chaos.proxy import FaultyPort

_MAX_FRAME_BYTES = 16 * 2**20
_HANDSHAKE = frozenset({"hello", "challenge", "prove", "welcome", "refused"})
_PING = "ping"
_MAX_PINGS_AHEAD = 2
"""A delayed frame is sent after this number of pings if no other frame follows: a link loses nothing."""


@dataclass(frozen=True)
class Trick:
    """A change of the next frame of a kind (None: any except pings). after: how many frames later it is repeated."""

    action: Literal["repeat", "swap"]
    kind: str | None = None
    after: int = 0


@dataclass
class _Kept:
    """A frame that is still to be written, after this number of other frames, or of pings."""

    frame: bytes
    num_frames: int
    num_pings: int


class FramedPort(FaultyPort):
    """Forwards one control port frame by frame; the frames of the handshake are not changed.

    tricks: each is played once. played: how often, by action and kind of frame.
    """

    def __init__(self, listen_host: str, target_host: str, port: int) -> None:
        super().__init__(listen_host, target_host, port)
        self.tricks: list[Trick] = []
        self.played: Counter[str] = Counter()
        self.num_frames: Counter[str] = Counter()
        self._passing = asyncio.Condition()

    async def until_frame(self, kind: str) -> None:
        """Wait until the next frame of this kind is about to pass."""
        seen = self.num_frames[kind]
        async with self._passing:
            await self._passing.wait_for(lambda: self.num_frames[kind] > seen)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        frames, kept = FrameBuffer(_MAX_FRAME_BYTES), deque[_Kept]()
        while chunk := await reader.read(65536):
            for body in frames.feed(chunk):
                kind = str(msgspec.msgpack.decode(body)["type"])
                async with self._passing:
                    self.num_frames[kind] += 1
                    self._passing.notify_all()
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                await self.is_open.wait()
                for frame in self._disturbed(as_frame(body), kind, kept):
                    writer.write(frame)
                await writer.drain()

    def _disturbed(self, frame: bytes, kind: str, kept: deque[_Kept]) -> list[bytes]:
        """Return the frames to send instead of this one."""
        due = _passed_by(kept, is_ping=kind == _PING)
        trick = None if kind in _HANDSHAKE else self._trick_for(kind)
        if trick is None:
            return [frame, *due]
        self.tricks.remove(trick)
        self.played[f"{trick.action} {kind}"] += 1
        if trick.action == "swap":
            kept.append(_Kept(frame, 1, _MAX_PINGS_AHEAD))
            return due
        if not trick.after:
            return [frame, frame, *due]
        kept.append(_Kept(frame, trick.after, trick.after + _MAX_PINGS_AHEAD))
        return [frame, *due]

    def _trick_for(self, kind: str) -> Trick | None:
        for trick in self.tricks:
            if trick.kind == kind or (trick.kind is None and kind != _PING):
                return trick
        return None


def _passed_by(kept: deque[_Kept], *, is_ping: bool) -> list[bytes]:
    for one in kept:
        one.num_pings -= 1
        one.num_frames -= not is_ping
    due = [one for one in kept if one.num_frames <= 0 or one.num_pings <= 0]
    for one in due:
        kept.remove(one)
    return [one.frame for one in due]
