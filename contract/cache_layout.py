"""The layers of a model in groups: those of one group keep the KV of the same tokens, in blocks of one shape.

A layer with a window keeps only what its window still reaches, so it needs a block table of its own. Each group has one
table for each request, and numbers its blocks by itself.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from contract.decoding import Count, Positive
from contract.layout import STATES, KVLayout, Side
from contract.state_layout import StateLayout

TYPICAL_TOKENS = 4096
"""The length of a typical request: the shares of memory are for as many of these as fit."""


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Layers whose KV is kept alike. Raises ValueError if the layout has another number of layers.

    layers: their numbers among those that keep KV, ascending; none in a model of recurrent layers alone, whose blocks have
    no bytes, and only count tokens. layout: the shape of a block over these layers. window: how many tokens a
    token sees, itself included, so that older blocks are not kept; None: all, and all are kept.
    """

    layers: tuple[Count, ...]
    layout: KVLayout
    window: Positive | None = None

    def __post_init__(self) -> None:
        """Compare the layers with the layout."""
        if len(self.layers) != self.layout.num_layers:
            raise ValueError(f"{len(self.layers)} layers do not fit a block of {self.layout.num_layers}")

    @property
    def name(self) -> str:
        """The kind of the group, with its window: "full", or "window of N tokens"."""
        return "full" if self.window is None else f"window of {self.window} tokens"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in these layers."""
        return self.layout.block_bytes // self.layout.block_size

    def seen_blocks(self, num_tokens: int) -> range:
        """Return the places of the blocks of the first ``num_tokens`` that the token behind them sees."""
        return range(self.num_passed_blocks(num_tokens), -(-num_tokens // self.layout.block_size))

    def num_passed_blocks(self, num_tokens: int) -> int:
        """Return how many of the first blocks are not seen by the token at position ``num_tokens``, or any behind it."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // self.layout.block_size

    def max_blocks(self, num_tokens: int, chunk: int) -> int:
        """Return the most blocks that a request of ``num_tokens`` needs at once, computed in chunks of ``chunk`` at most.

        In a step these are the blocks of the chunk, and those that its first token sees.
        """
        size = self.layout.block_size
        num_blocks = -(-num_tokens // size)
        if self.window is None:
            return num_blocks
        # The span may begin anywhere in a block.
        span = self.window - 1 + chunk
        return min(num_blocks, (span + size - 2) // size + 1)


class CacheLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """All groups of a model. Raises ValueError unless they have each layer once.

    groups: the one that reaches farthest first: of all tokens, if there is one, then by window, from wide to narrow.
    states: what the recurrent layers keep, in one slot of a request; None: the model has none.
    """

    groups: Annotated[tuple[CacheGroup, ...], msgspec.Meta(min_length=1)]
    states: StateLayout | None = None

    def __post_init__(self) -> None:
        """Check the layers."""
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if layers != list(range(len(layers))):
            raise ValueError(f"the groups have the layers {layers}; each of a model must be in one of them")

    @classmethod
    def of(
        cls,
        layout: KVLayout,
        windows: Sequence[int | None],
        states: StateLayout | None = None,
        max_model_len: int | None = None,
    ) -> "CacheLayout":
        """Return the groups of a model of which each layer has the shape of ``layout`` and a window; None: all tokens.

        max_model_len: of the longest text; a window that no text is longer than is none.
        """
        if not windows:
            return cls((CacheGroup(layers=(), layout=msgspec.structs.replace(layout, num_layers=0)),), states)
        reaches = [
            window if max_model_len is None or (window or 0) < max_model_len else None for window in windows
        ]
        return cls.of_layers([layout] * len(windows), reaches, states)

    @classmethod
    def of_layers(
        cls,
        layouts: Sequence[KVLayout],
        windows: Sequence[int | None],
        states: StateLayout | None = None,
    ) -> "CacheLayout":
        """Return the groups of a model with a layout and a window of each layer; ``num_layers`` of a layout is not read.

        Raises ValueError if layers with equal windows have different layouts.
        """
        groups = []
        for window in sorted(set(windows), key=lambda each: (each is not None, -(each or 0))):
            layers = tuple(layer for layer, own in enumerate(windows) if own == window)
            own_layouts = {
                msgspec.structs.replace(layouts[layer], num_layers=len(layers)) for layer in layers
            }
            if len(own_layouts) > 1:
                raise ValueError(f"the layers {list(layers)} have equal windows and KV of different shapes")
            groups.append(CacheGroup(layers=layers, layout=own_layouts.pop(), window=window))
        return cls(tuple(groups), states)

    @property
    def is_uniform(self) -> bool:
        """True if each layer with KV keeps all tokens: one table, and blocks of ``groups[0].layout``."""
        return len(self.groups) == 1 and self.groups[0].window is None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(group.token_bytes for group in self.groups)

    def request_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the blocks that a request of ``num_tokens`` holds while it is answered."""
        return sum(group.max_blocks(num_tokens, 1) * group.layout.block_bytes for group in self.groups)

    def fingerprint(self) -> str:
        """Return a short hash; that of the block's layout if all layers keep all tokens (``KVLayout.fingerprint``)."""
        if self.is_uniform and self.states is None:
            return self.groups[0].layout.fingerprint()
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()


class GroupedSide(Side, frozen=True):
    """The KV of a worker of which not each layer keeps all tokens. layout: of the first group, and the first rank.

    layers: the groups of layers with KV. states: of recurrent layers; the pieces of a slot are one more group, the last one,
    which is the only one if no layer has KV. Raises ValueError for groups that the ranks do not hold.
    """

    layers: tuple[CacheGroup, ...] = ()
    states: StateLayout | None = None

    def __post_init__(self) -> None:
        """Check each group."""
        super().__post_init__()
        _ = self.groups

    @classmethod
    def of(
        cls,
        groups: Sequence[CacheGroup],
        num_ranks: int,
        num_kv_heads: int,
        states: StateLayout | None = None,
    ) -> Side:
        """Return the side of a worker with these groups; a plain one if each layer keeps all tokens, and none has states."""
        cache = CacheLayout(tuple(groups), states)
        layout = cache.groups[0].layout
        if cache.is_uniform and states is None:
            return Side(layout, num_ranks, num_kv_heads)
        return cls(layout, num_ranks, num_kv_heads, cache.groups, states)

    @property
    def kv_groups(self) -> tuple[CacheGroup, ...]:
        """The groups of which blocks are handed over: not that of a model without KV, whose blocks have no bytes."""
        return tuple(group for group in self.layers if group.layers)

    @property
    def groups(self) -> tuple[Side, ...]:
        """See Side. Groups of one rank may differ in their heads; several ranks share the same heads in each group."""
        heads = self.num_kv_heads if self.num_ranks > 1 else 0
        sides = [Side(group.layout, self.num_ranks, heads) for group in self.kv_groups]
        if self.states is not None:
            sides.append(Side(self.states.piece_layout, self.num_ranks))
        return tuple(sides)

    @property
    def group_names(self) -> tuple[str, ...]:
        """See Side."""
        names = [f"{_spans(group.layers)}: {group.name}" for group in self.kv_groups]
        return (*names, *(() if self.states is None else STATES))

    @property
    def state_group(self) -> int | None:
        """See Side."""
        return None if self.states is None else len(self.kv_groups)

    def differences(self, other: Side) -> list[str]:
        """See Side. States are not converted: those of another type, or of other layers, continue nothing here."""
        if self.group_names == other.group_names and self.states is not None:
            states = other.states if isinstance(other, GroupedSide) else None
            if difference := self.states.difference(states):
                return [difference]
        return super().differences(other)

    def places_to_send(self, num_tokens: int) -> tuple[range, ...]:
        """See Side: of a group with a window, the blocks that the token behind the prompt sees; of states, all pieces."""
        places = [group.seen_blocks(num_tokens) for group in self.kv_groups]
        if self.states is not None:
            places.append(range(self.states.num_pieces))
        return tuple(places)


def _spans(layers: Sequence[int]) -> str:
    """Return the numbers of layers in words, neighbours as one span."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and spans[-1][-1] == layer - 1:
            spans[-1][1:] = [layer]
        else:
            spans.append([layer])
    return "layers " + ", ".join("-".join(map(str, span)) for span in spans)
