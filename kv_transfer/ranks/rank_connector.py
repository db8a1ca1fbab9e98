"""The ranks' halves of a connector, as the executor of an engine of several ranks handles them."""

from collections.abc import Callable, Sequence
from socket import socket

import msgspec

from contract.errors import SettingError
from engine.connector import RankConnector, RankConnectorPlan
from kv_transfer.counters import Completions
from kv_transfer.ranks.rank_data import RankSettings
from kv_transfer.ranks.rank_data_group import RankDataGroup

OPENER = "kv_transfer.ranks.rank_half:open_rank_half"


class MultiRankConnector:
    """Fulfils ``RanksConnector`` for several ranks. serve: begin to serve peers, once every rank has opened its half."""

    def __init__(
        self,
        settings: Sequence[RankSettings],
        group: RankDataGroup,
        completions: Completions,
        serve: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._group = group
        self._serve = serve
        self.take_finished = completions.take
        self.close = group.close

    def in_process(self) -> RankConnector:
        """Raise SettingError: each half is opened in its rank's process."""
        raise SettingError(
            f"the connector is for {len(self._settings)} ranks, each in a process of its own",
            param="tensor_parallel_size",
        )

    def connect(self, sockets: Sequence[socket], peers: Sequence[int]) -> list[RankConnectorPlan]:
        """See RanksConnector."""
        self._group.connect(sockets)
        encoded = [msgspec.msgpack.encode(each) for each in self._settings]
        return [RankConnectorPlan(OPENER, *each) for each in zip(encoded, peers, strict=True)]

    def begin(self) -> None:
        """See RanksConnector."""
        self._group.wait_opened()
        self._serve()
