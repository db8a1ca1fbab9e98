"""Several senders as one: the same leases are lent over every transport that this worker offers."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from engine.connector import KVMemory
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.reads import LeaseName
from kv_transfer.transports.transport import SenderTransport


@runtime_checkable
class Conditional(Protocol):
    """A sender that finds out only with the pool whether it can lend. why_not_offered: None when it can."""

    why_not_offered: str | None


class IdleTogether:
    """Tells ``on_idle`` once for each release, when every sender has said that nobody reads any more. Thread-safe."""

    def __init__(self, senders: Sequence[str], on_idle: Callable[[LeaseName], None]) -> None:
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._said: dict[str, Counter[LeaseName]] = {sender: Counter() for sender in senders}

    def leave_out(self, sender: str) -> None:
        """This one could not be opened: it will say nothing."""
        del self._said[sender]

    def say(self, sender: str, name: LeaseName) -> None:
        """This sender has no reader of the lease."""
        with self._lock:
            self._said[sender][name] += 1
            if not all(said[name] for said in self._said.values()):
                return
            for said in self._said.values():
                said[name] -= 1
                if not said[name]:
                    del said[name]
        self._on_idle(name)


class Lending:
    """Owns the senders by their transports' names, best first. Thread-safe, as they are."""

    def __init__(self, senders: Mapping[str, SenderTransport]) -> None:
        self._senders = dict(senders)

    def offers(self) -> list[Offer]:
        """What a peer can read over, best first."""
        return [
            Offer(name, sender.address)
            for name, sender in self._senders.items()
            if not isinstance(sender, Conditional) or sender.why_not_offered is None
        ]

    def why_not(self) -> dict[str, str]:
        """Transports that are open but not offered, and why."""
        return {
            name: sender.why_not_offered
            for name, sender in self._senders.items()
            if isinstance(sender, Conditional) and sender.why_not_offered is not None
        }

    def start(self, memory: KVMemory) -> None:
        """Lend from this pool."""
        for sender in self._senders.values():
            sender.start(memory)

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> tuple[tuple[str, bytes], ...]:
        """Append blocks to the lease, everywhere; returns (transport, grant) of those that hand out any."""
        granted = [(each, sender.publish(name, block_ids)) for each, sender in self._senders.items()]
        return tuple((each, grant) for each, grant in granted if grant is not None)

    def release(self, name: LeaseName) -> None:
        """End the lease, everywhere."""
        for sender in self._senders.values():
            sender.release(name)

    def close(self) -> None:
        """Close every sender."""
        for sender in self._senders.values():
            sender.close()
