"""Receivers for peers that may have several ranks: a link's source names all of them, and a read goes to one."""

from collections.abc import Mapping, Sequence

from contract.errors import InternalError
from kv_transfer.protocol.reads import Read, ReadRequest, Source
from kv_transfer.transports.transport import Probing, ReceiverTransport


class OfRanks:
    """Keeps something open to each of a peer's ranks that this rank reads from. rank, num_ranks: this worker's."""

    def __init__(self, receiver: ReceiverTransport, rank: int, num_ranks: int) -> None:
        self._receiver = receiver
        self._rank = rank
        self._num_ranks = num_ranks

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """See ReceiverTransport; ``source`` is one rank's."""
        self._receiver.fetch(source, request, views, read)

    def forget(self, source: Source) -> None:
        """See ReceiverTransport; every rank of ``source``."""
        for each in self._each(source):
            self._receiver.forget(each)

    def close(self) -> None:
        """See ReceiverTransport."""
        self._receiver.close()

    def _each(self, source: Source) -> list[Source]:
        return [source.of_rank(rank) for rank in ranks_read(self._rank, self._num_ranks, source.num_ranks)]


class TriedOfRanks(OfRanks):
    """One that has to be tried."""

    def probe(self, source: Source, read: Read) -> None:
        """See Probing; every rank of ``source`` that this one reads from."""
        for each in self._each(source):
            probe(self._receiver, each, read)


def of_ranks(
    receivers: Mapping[str, ReceiverTransport], rank: int = 0, num_ranks: int = 1
) -> dict[str, ReceiverTransport]:
    """The same receivers, for one of this worker's ranks."""
    return {
        name: (TriedOfRanks if isinstance(receiver, Probing) else OfRanks)(receiver, rank, num_ranks)
        for name, receiver in receivers.items()
    }


def probe(receiver: ReceiverTransport, source: Source, read: Read) -> None:
    """Try this source. Raises what a fetch would, and InternalError for a receiver that cannot be tried."""
    if not isinstance(receiver, Probing):
        raise InternalError(f"transport {source.transport} cannot be tried")
    receiver.probe(source, read)


def ranks_read(rank: int, num_ranks: int, num_theirs: int) -> range:
    """The peer's ranks that hold heads of ours: equal runs of the same heads on both sides (``TransferPlan.ranks_of``)."""
    return range(rank * num_theirs // num_ranks, ((rank + 1) * num_theirs - 1) // num_ranks + 1)
