"""What the executor of several ranks gets of a connector (``engine.connector.RanksConnector``)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from socket import socket

import msgspec

from contract.errors import SettingError
from kv_transfer.counters import Completions
from kv_transfer.protocol.reads import rank_boot_id
from kv_transfer.ranks.halves import RankDataHalves
from kv_transfer.ranks.opening import Opening
from kv_transfer.ranks.words import RankSettings
from kv_transfer.settings import TransferSettings

_OPEN_SECONDS = 30.0


@dataclass(frozen=True)
class JoinedParts:
    """What it is made of. on_opened: begin to serve peers, with what all ranks can do. on_close: end what tries peers."""

    halves: RankDataHalves
    completions: Completions
    on_opened: Callable[[Opening], None]
    on_close: Callable[[], None]


class JoinedRanks:
    """Fulfils ``RanksConnector``."""

    opener = "kv_transfer.ranks.rank_half:open_rank_half"

    def __init__(self, settings: TransferSettings, num_ranks: int, parts: JoinedParts) -> None:
        self._settings = settings
        self._num_ranks = num_ranks
        self._parts = parts

    def settings_of(self, rank: int) -> bytes:
        """See RanksConnector."""
        return msgspec.msgpack.encode(rank_settings(self._settings, rank, self._num_ranks))

    def connect(self, lines: Sequence[socket]) -> None:
        """See RanksConnector."""
        self._parts.halves.connect(lines)

    def begin(self) -> None:
        """See RanksConnector."""
        self._parts.on_opened(self._parts.halves.wait_opened(_OPEN_SECONDS))

    def take_finished(self) -> tuple[set[str], set[str]]:
        """See RanksConnector."""
        return self._parts.completions.take()

    def close(self) -> None:
        """See RanksConnector."""
        self._parts.halves.stop_trials()
        self._parts.on_close()
        self._parts.halves.close()


def rank_settings(settings: TransferSettings, rank: int, num_ranks: int) -> RankSettings:
    """What one rank's half needs of a worker's settings. A fixed data port is rank 0's; the others follow it.

    Raises SettingError for what cannot be handed to another process, or leaves too few ports.
    """
    for name in ("local", "decorate"):
        if getattr(settings, name) is not None:
            raise SettingError(f"{name} is for workers of one rank; this one has {num_ranks}", param=name)
    last_port = settings.data_port and settings.data_port + num_ranks - 1
    if last_port > 65535:
        raise SettingError(
            f"data_port is {settings.data_port}, and each of {num_ranks} ranks needs a port from there on;"
            f" it must be {65536 - num_ranks} or less",
            param="data_port",
        )
    return RankSettings(
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
