"""The data half of one rank with the transports of its own; in the core's process, or in the rank's."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from contract.errors import InternalError, SettingError
from engine.connector import RanksConnector, SingleRankConnector
from kv_transfer.counters import Completions, Counters
from kv_transfer.data.data_half import DataHalf
from kv_transfer.data.threads import DataReports
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source, rank_boot_id
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.choosing import Chooser
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.local import LocalHub
from kv_transfer.transports.registry import open_transports
from kv_transfer.transports.transport import Probing, ReceiverTransport, Senders, TransportContext


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one rank's transports; see ``TransferSettings``. boot_id: of this rank's transports."""

    rank: int
    num_ranks: int
    boot_id: str
    host: str
    advertise_host: str | None
    data_port: int
    transport: str
    read_timeout_seconds: float
    max_staging_bytes: int
    shm_dir: str | None

    @classmethod
    def of(cls, settings: TransferSettings, rank: int, num_ranks: int) -> "RankSettings":
        """Return a rank's part of a worker's settings. A fixed data port is rank 0's; the others follow it."""
        return cls(
            rank=rank,
            num_ranks=num_ranks,
            boot_id=rank_boot_id(settings.boot_id, rank, num_ranks),
            host=settings.host,
            advertise_host=settings.advertise_host,
            data_port=settings.data_port and settings.data_port + rank,
            transport=settings.transport_name,
            read_timeout_seconds=settings.read_timeout_seconds,
            max_staging_bytes=settings.max_staging_bytes,
            shm_dir=None if settings.shm_dir is None else str(settings.shm_dir),
        )


def rank_settings(settings: TransferSettings, num_ranks: int) -> list[RankSettings]:
    """Return each rank's settings.

    Raises SettingError for what cannot be sent to another process, and for a data port with too few ports behind it.
    """
    for name in ("local", "decorate"):
        if num_ranks > 1 and getattr(settings, name) is not None:
            raise SettingError(f"{name} is for workers of one rank; this one has {num_ranks}", param=name)
    last_port = settings.data_port and settings.data_port + num_ranks - 1
    if last_port > 65535:
        raise SettingError(
            f"data_port is {settings.data_port}, and each of {num_ranks} ranks needs a port from there on;"
            f" it must be {65536 - num_ranks} or less",
            param="data_port",
        )
    return [RankSettings.of(settings, rank, num_ranks) for rank in range(num_ranks)]


class RankData:
    """A ``DataHalf``, with what it lends and reads over. Its transports' ports are open when the constructor returns.

    decorate: see ``TransferSettings``. Raises SettingError, and OSError when a port cannot be bound.
    """

    def __init__(
        self,
        settings: RankSettings,
        counters: Counters,
        completions: Completions,
        local: LocalHub | None = None,
        decorate: Callable[[ReceiverTransport], ReceiverTransport] | None = None,
    ) -> None:
        self.sessions = Sessions()
        context = TransportContext(
            host=settings.host,
            advertise_host=settings.advertise_host,
            data_port=settings.data_port,
            boot_id=settings.boot_id,
            read_timeout_seconds=settings.read_timeout_seconds,
            sessions=self.sessions,
            on_idle=self._on_idle,
            local=local,
            shm_dir=None if settings.shm_dir is None else Path(settings.shm_dir),
            on_thread_failed=self._on_thread_failed,
        )
        senders, receivers = open_transports(settings.transport, context)
        self._senders = Senders(senders)
        self.release = self._senders.release
        self.offers = self._senders.offers
        self._readers = {
            name: RankReader(receiver, settings.rank, settings.num_ranks)
            for name, receiver in receivers.items()
        }
        self.chooser = Chooser(self._readers, counters)
        receiver = self.chooser if decorate is None else decorate(self.chooser)
        self.half = DataHalf(receiver, counters, completions, tuple(receivers), settings.max_staging_bytes)
        self.chooser.attach(self.half.post_pull)

    def attach(self, reports: DataReports) -> None:
        """Set the receiver of the reports; called once, before ``half.start``."""
        self._reports = reports
        self.half.attach(self._senders, reports)

    def connector(self, serve: Callable[[], None]) -> RanksConnector:
        """Return the executor's side, for a worker of one rank. serve: begins to serve peers; called at once."""
        serve()
        return SingleRankConnector(self.half)

    def readers(self) -> list[str]:
        """Return the transports that can be read over, best first."""
        return list(self._readers)

    def probing(self) -> list[str]:
        """Return the transports that have to be probed."""
        return [name for name, reader in self._readers.items() if isinstance(reader, Probing)]

    def probe(self, source: Source, read: Read) -> None:
        """Try to read a source. Raises what a read would, and InternalError for a transport that cannot be probed."""
        reader = self._readers[source.transport]
        if not isinstance(reader, Probing):
            raise InternalError(f"transport {source.transport} cannot be probed")
        reader.probe(source, read)

    def close(self) -> None:
        """Close the transports of a half that was never started; a half closes them itself (``half.close``)."""
        self._senders.close()

    def _on_idle(self, name: LeaseName) -> None:
        self._reports.lease_idle(name)

    def _on_thread_failed(self, thread: str, error: BaseException) -> None:
        self._reports.thread_failed(thread, error)


class RankReader:
    """A receiver for peers of several ranks: the source of a link names all, a read goes to one.

    It keeps something open to each of the peer's ranks that this rank reads from. rank, num_ranks: this worker's. probe:
    see Probing; only over a transport that has to be probed.
    """

    def __init__(self, receiver: ReceiverTransport, rank: int, num_ranks: int) -> None:
        self._receiver = receiver
        self._rank = rank
        self._num_ranks = num_ranks
        self.close = receiver.close
        if isinstance(receiver, Probing):
            self.probe = partial(self._probe_each, receiver)

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """See ReceiverTransport; ``source`` is one rank's."""
        self._receiver.fetch(source, request, views, read)

    def forget(self, source: Source) -> None:
        """See ReceiverTransport; every rank of ``source``."""
        for each in self._each(source):
            self._receiver.forget(each)

    def _probe_each(self, receiver: Probing, source: Source, read: Read) -> None:
        for each in self._each(source):
            receiver.probe(each, read)

    def _each(self, source: Source) -> list[Source]:
        return [source.of_rank(rank) for rank in ranks_read(self._rank, self._num_ranks, source.num_ranks)]


def ranks_read(rank: int, num_ranks: int, num_theirs: int) -> range:
    """Return the peer's ranks that hold heads of ours: equal runs on both sides (``TransferPlan.ranks_of``)."""
    return range(rank * num_theirs // num_ranks, ((rank + 1) * num_theirs - 1) // num_ranks + 1)
