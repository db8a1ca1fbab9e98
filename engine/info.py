"""The facts about a running engine that others need."""

import msgspec

from contract.cache_layout import CacheGroup, CacheLayout, GroupedSide
from contract.layout import KVLayout, Side
from contract.state_layout import StateLayout


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A running engine, as its client and other workers see it.

    max_model_len: tokens that prompt and answer may have together, in this engine. eos_token_ids: the model's own end
    tokens. layout: of one of ``num_ranks`` ranks. control_address: "host:port" of the connector's control link; empty
    without a connector. has_head: False for a model that computes embeddings only. num_kv_heads: see ``Side``.
    device: "cpu", or "cuda:N" of the first rank. model: the model's folder.
    groups, group_blocks: the groups of layers, and the number of blocks of each, if not each layer keeps all tokens. Then
    layout and num_blocks are those of the first group. states, num_state_slots: of recurrent layers, num_spare_slots of them
    for drafts, num_snapshot_slots for snapshots.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    model_fingerprint: str
    layout: KVLayout
    num_blocks: int
    dtype: str
    control_address: str
    num_ranks: int = 1
    has_head: bool = True
    num_kv_heads: int = 0
    device: str = "cpu"
    model: str = ""
    groups: tuple[CacheGroup, ...] = ()
    group_blocks: tuple[int, ...] = ()
    states: StateLayout | None = None
    num_state_slots: int = 0
    num_spare_slots: int = 0
    num_snapshot_slots: int = 0

    @property
    def num_request_slots(self) -> int:
        """The number of requests that may have states at once."""
        return self.num_state_slots - self.num_spare_slots - self.num_snapshot_slots

    @property
    def side(self) -> Side:
        """The layout of the engine's KV."""
        groups = self.groups
        if self.states is not None and not groups:
            groups = CacheLayout.of(self.layout, [None] * self.layout.num_layers).groups
        if groups:
            return GroupedSide.of(groups, self.num_ranks, self.num_kv_heads, self.states)
        return Side(self.layout, self.num_ranks, self.num_kv_heads)
