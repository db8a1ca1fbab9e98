"""All senders of a worker as one: the same leases are lent over every transport that it offers."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from engine.connector import KVMemory
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.reads import LeaseName
from kv_transfer.transports.transport import Conditional, SenderTransport


class IdleTogether:
    """Calls ``on_idle`` once per release, when every sender has reported that it has no reader any more. Thread-safe."""

    def __init__(self, senders: Sequence[str], on_idle: Callable[[LeaseName], None]) -> None:
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._reported: dict[str, Counter[LeaseName]] = {sender: Counter() for sender in senders}

    def leave_out(self, sender: str) -> None:
        """Expect no report from this sender: it could not be opened."""
        del self._reported[sender]

    def report(self, sender: str, name: LeaseName) -> None:
        """Record that this sender has no reader of the lease."""
        with self._lock:
            self._reported[sender][name] += 1
            if not all(reported[name] for reported in self._reported.values()):
                return
            for reported in self._reported.values():
                reported[name] -= 1
                if not reported[name]:
                    del reported[name]
        self._on_idle(name)


class Senders:
    """Owns the senders by their transports' names, best first. Thread-safe, as they are."""

    def __init__(self, senders: Mapping[str, SenderTransport]) -> None:
        self._senders = dict(senders)

    def offers(self) -> list[Offer]:
        """Return what a peer can read over, best first."""
        reasons = self.why_not()
        return [Offer(name, sender.address) for name, sender in self._senders.items() if name not in reasons]

    def why_not(self) -> dict[str, str]:
        """Return the transports that are open but not offered, and why."""
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
        """Append blocks to the lease on every sender; return (transport, grant) of those that return a grant."""
        granted = [(each, sender.publish(name, block_ids)) for each, sender in self._senders.items()]
        return tuple((each, grant) for each, grant in granted if grant is not None)

    def release(self, name: LeaseName) -> None:
        """End the lease on every sender."""
        for sender in self._senders.values():
            sender.release(name)

    def close(self) -> None:
        """Close every sender."""
        for sender in self._senders.values():
            sender.close()
