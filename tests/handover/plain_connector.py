"""A reference for hand-overs between unequal engines: the plainest connector, without transport, plan or blocks.

The sender's KV of a whole prompt becomes one tensor ``[num_layers, parts, num_kv_heads, num_tokens, head_dim]``; the
receiver rounds it to its own dtype and cuts it into its own blocks. One request at a time: the prefill leg ends before the
decode leg begins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from contract.identity import Role
from contract.layout import KVLayout, Side
from contract.outputs import TransferReport
from contract.requests import EngineRequest
from engine.connecting import ConnectorFactory
from engine.connector import (
    ConnectorPair,
    FirstToken,
    KVMemory,
    Published,
    Received,
    SingleRankConnector,
    TransferEvent,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Shelf:
    """Stores prompts' KV between the legs, by transfer id; one for both engines."""

    kv: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, list[FirstToken]] = field(default_factory=dict)

    def connect(self, role: Role) -> ConnectorFactory:
        """A factory of either side's connector."""

        def factory(side: Side, _fingerprint: str, wake: Callable[[], None]) -> ConnectorPair:
            connector = PlainConnector(self, side.layout, wake)
            return ConnectorPair(connector, SingleRankConnector(PlainRank(connector)), f"{role}:1")

        return factory


class PlainConnector:
    """Both directions of ``SchedulerConnector``. A request that has published its last token has published all."""

    def __init__(self, shelf: Shelf, layout: KVLayout, wake: Callable[[], None]) -> None:
        self.shelf, self.layout, self._wake = shelf, layout, wake
        self.memory: KVMemory | None = None
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self._lent: dict[str, tuple[EngineRequest, list[int]]] = {}
        self._fetched: dict[str, EngineRequest] = {}
        self._events: list[TransferEvent] = []
        self._ready: list[str] = []

    @property
    def sender(self) -> "PlainConnector":
        return self

    @property
    def receiver(self) -> "PlainConnector":
        return self

    def open_send(
        self,
        request: EngineRequest,
        block_ids: list[int],
        _num_cached_tokens: int,
        _windows: Sequence[Sequence[int]] = (),
    ) -> None:
        self._lent[request.key] = request, block_ids

    def publish(self, key: str, num_computed_tokens: int, _windows: Sequence[Sequence[int]] = ()) -> None:
        if num_computed_tokens == len(self._lent[key][0].prompt_token_ids):
            self._ready.append(key)

    def finish_send(self, key: str, first_tokens: list[FirstToken]) -> None:
        transfer = self._lent.pop(key)[0].transfer
        assert transfer is not None
        self.shelf.tokens[transfer.transfer_id] = first_tokens
        self.sent.add(key)
        self._wake()

    def start_fetch(self, request: EngineRequest) -> None:
        self._fetched[request.key] = request
        self._events.append(Published(request.key))
        self._wake()

    def receive_into(
        self,
        key: str,
        block_ids: list[int],
        num_cached_blocks: int,
        _other_groups: Sequence[Sequence[int]] = (),
    ) -> None:
        kv = self.shelf.kv[self._transfer_of(key)]
        for index in range(num_cached_blocks, len(block_ids)):
            start, end = index * self.layout.block_size, (index + 1) * self.layout.block_size
            tokens = kv[:, :, :, start:end]
            self._block(block_ids[index])[:, :, :, : tokens.shape[3]] = tokens.to(DTYPES[self.layout.dtype])
        self.received.add(key)
        self._wake()

    def pop_received(self, key: str) -> Received:
        tokens = self.shelf.tokens[self._transfer_of(key)]
        del self._fetched[key]
        return Received(tokens, TransferReport())

    def pop_events(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        return events

    def next_arrival(self) -> None:
        return None

    def has_arrived(self) -> bool:
        return bool(self.received)

    def build_metadata(self) -> Any | None:
        ready, self._ready = self._ready, []
        return ready or None

    def has_work(self) -> bool:
        return bool(self._events or self._ready or self.sent or self.received)

    def set_model_fingerprint(self, model_fingerprint: str) -> None:
        raise AssertionError(f"the weights of {model_fingerprint} were loaded")

    def abandon_send(self, key: str, kind: str, message: str) -> None:
        raise AssertionError(f"{key} was abandoned: {kind}: {message}")

    def cancel_fetch(self, key: str) -> bool:
        raise AssertionError(f"{key} was cancelled")

    def debug_state(self) -> dict[str, Any]:
        return {}

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        return

    def keep(self, key: str) -> None:
        """The prompt is computed: put its KV on the shelf."""
        request, block_ids = self._lent[key]
        assert request.transfer is not None
        whole = torch.cat([self._block(block_id) for block_id in block_ids], dim=3)
        num_tokens = len(request.prompt_token_ids)
        self.shelf.kv[request.transfer.transfer_id] = whole[:, :, :, :num_tokens]

    def _transfer_of(self, key: str) -> str:
        transfer = self._fetched[key].transfer
        assert transfer is not None
        return transfer.transfer_id

    def _block(self, block_id: int) -> Tensor:
        assert self.memory is not None
        layout = self.layout
        flat = torch.frombuffer(self.memory.write_view(block_id), dtype=DTYPES[layout.dtype])
        return flat.view(layout.shape)


class PlainRank:
    """The rank's half: everything happens in the step's thread."""

    def __init__(self, connector: PlainConnector) -> None:
        self._connector = connector

    def start(self, memory: KVMemory) -> None:
        self._connector.memory = memory

    def watch_layers(self, metadata: Any) -> None:
        """See RankConnector. Nothing is watched."""

    def execute(self, metadata: Any) -> None:
        for key in metadata:
            self._connector.keep(key)

    def get_finished(self) -> tuple[set[str], set[str]]:
        connector = self._connector
        taken = connector.sent, connector.received
        connector.sent, connector.received = set(), set()
        return taken

    def close(self) -> None:
        return
