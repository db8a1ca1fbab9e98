"""Makes clients that waste the event loop's time wait for each other, so that other clients do not wait for them.

A connection that breaks a rule, a handshake that fails and a call without a key are cheap alone: about a millisecond. Their
client can send the next at once, on as many connections as an address may have, and then the event loop does nothing else.
Limits on one connection do not help against that; a limit on all that its address wastes does.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

OPENING_SECONDS = 0.0005
"""Time of the event loop to accept and to end a connection."""
CALL_SECONDS = 0.0005
"""Time of the event loop for a gRPC call that is rejected."""
HANDSHAKE_SECONDS = 0.002
"""Time of the event loop for a TLS handshake, mostly for the signature."""
SHARE = 0.1
"""The part of the event loop's time that wasteful addresses may take together."""
ALLOWANCE_SECONDS = 0.1
"""Wasted time that has no effect: mistakes, and a load balancer's health checks, stay below it."""
ADDRESS_SECONDS = 0.01
"""Wasted time of one address that has no effect, whatever others do."""
MEMORY_SECONDS = 10.0
_MAX_ADDRESSES = 1024


@dataclass(frozen=True)
class _Waste:
    """Wasted seconds of one address. last: those of its last connection or call. at: when that was noted."""

    seconds: float
    last: float
    at: float


class Penalties:
    """Owns an account of wasted seconds, which ``SHARE`` of the time refills, and the addresses that have wasted some.

    While the account is overdrawn, the connections of these addresses are served one after another, each after a pause in
    proportion to what the last one of its address took. Others are served at once. clock: returns seconds. has_tls: each
    connection begins with a handshake.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, has_tls: bool = False) -> None:
        self.opening_seconds = HANDSHAKE_SECONDS if has_tls else OPENING_SECONDS
        """Time of the event loop to open a connection."""
        self._clock = clock
        self._left = (ALLOWANCE_SECONDS, clock())
        # The address that has wasted most recently is the last, so the first one is dropped when there are too many.
        self._by_address: dict[str, _Waste] = {}
        self._turn = asyncio.Lock()
        self._refunded = asyncio.Event()

    def note(self, address: str, seconds: float) -> None:
        """Record that this address has wasted so many seconds of the event loop."""
        now = self._clock()
        self._left = (self._seconds_left(now) - seconds, now)
        before = self._by_address.pop(address, None)
        if len(self._by_address) >= _MAX_ADDRESSES:
            del self._by_address[next(iter(self._by_address))]
        total = before.seconds if before and now - before.at < MEMORY_SECONDS else 0.0
        self._by_address[address] = _Waste(total + seconds, seconds, now)

    def refund(self, address: str, seconds: float) -> None:
        """Take back what was noted for a connection that has turned out to be useful."""
        now = self._clock()
        self._left = (min(ALLOWANCE_SECONDS, self._seconds_left(now) + seconds), now)
        if (before := self._by_address.get(address)) is not None:
            # What is refunded may be forgotten already: that is no credit for later waste.
            self._by_address[address] = _Waste(max(0.0, before.seconds - seconds), before.last, before.at)
        self._refunded.set()

    def is_due(self, address: str) -> bool:
        """Return True if a connection of this address has to wait for its turn."""
        waste = self._by_address.get(address)
        if waste is None or waste.seconds < ADDRESS_SECONDS:
            return False
        now = self._clock()
        return now - waste.at < MEMORY_SECONDS and self._seconds_left(now) < 0

    async def until_turn(self, address: str) -> None:
        """Wait until a connection of this address may go on. Its order is that of the calls; a cancelled one is left out."""
        async with self._turn:
            if not self.is_due(address):
                return
            with suppress(TimeoutError):
                # While the account is overdrawn, so wasteful a connection may come once in this time.
                async with asyncio.timeout(self._by_address[address].last / SHARE):
                    while self.is_due(address):
                        self._refunded.clear()
                        await self._refunded.wait()

    def _seconds_left(self, now: float) -> float:
        left, since = self._left
        return min(ALLOWANCE_SECONDS, left + (now - since) * SHARE)


class Probation:
    """The time of the event loop that one connection of this address takes, which is wasted until it proves useful."""

    def __init__(self, penalties: Penalties, address: str) -> None:
        self._penalties = penalties
        self._address = address
        self._seconds = 0.0
        self._is_over = False
        self.note(penalties.opening_seconds)

    @property
    def is_due(self) -> bool:
        """True if the connection has to wait for its address's turn."""
        return self._penalties.is_due(self._address)

    async def until_turn(self) -> None:
        """Wait until the connection may go on."""
        await self._penalties.until_turn(self._address)

    def note(self, seconds: float) -> None:
        """Record time that the connection has taken; after its probation nothing is recorded."""
        if not self._is_over:
            self._seconds += seconds
            self._penalties.note(self._address, seconds)

    def fail(self) -> None:
        """Record that the connection has broken a rule: opening it was in vain, even if it was useful before."""
        if self._is_over:
            self._penalties.note(self._address, self._penalties.opening_seconds)

    def end(self) -> None:
        """Take back what was noted: the connection is useful. Does nothing the second time."""
        if not self._is_over:
            self._is_over = True
            self._penalties.refund(self._address, self._seconds)
