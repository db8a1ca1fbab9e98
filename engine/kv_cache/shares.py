"""Groups layers, and divides the memory of the KV cache among the groups and slots of states. Needs no torch."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from contract.cache_layout import TYPICAL_TOKENS, CacheLayout
from contract.errors import SettingError
from contract.layout import KVLayout
from contract.state_layout import StateLayout

HOST_LIMIT_BYTES = 1 << 30
"""The most memory that the KV cache of a worker takes on the host without a setting."""
# Two requests of any length can run at once.
_LEAST_REQUESTS = 2
# In a large batch only the drafts of few requests are computed.
_REQUESTS_OF_SPARE = 4
# Blocks without bytes only count tokens; each of them is an entry of some lists, though.
_MOST_EMPTY_BLOCKS = 1 << 20


@dataclass(frozen=True)
class Workload:
    """The largest work of an engine: tokens of prompt and answer together, tokens and requests of a step."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True)
class StateNeeds:
    """The states of recurrent layers. block_size: of the KV blocks. num_snapshots: slots beside those of requests.

    has_drafts: there are spare slots as well, one for each request that has drafts in a step.
    """

    layout: StateLayout
    block_size: int
    num_snapshots: int = 0
    has_drafts: bool = False

    def num_spares(self, num_requests: int) -> int:
        """Return the number of spare slots beside those of ``num_requests``: drafts are seldom worth their time in more."""
        return -(-num_requests // _REQUESTS_OF_SPARE) if self.has_drafts else 0


def group_layers(
    layouts: Sequence[KVLayout],
    windows: Sequence[int | None],
    states: StateLayout | None,
    max_model_len: int,
) -> CacheLayout:
    """Return the groups of a model with a layout and a window of each layer; see ``CacheLayout``.

    layouts: one at least, also if no layer has KV. Raises SettingError for layers that cannot be in one group.
    """
    if len(set(layouts)) == 1:
        return CacheLayout.of(layouts[0], windows, states, max_model_len)
    try:
        return CacheLayout.of_layers(layouts, windows, states)
    except ValueError as error:
        raise SettingError(f"this model is not served: {error}", param="model") from error


def share_memory(layout: CacheLayout, num_bytes: int, workload: Workload) -> tuple[int, ...]:
    """Return the number of blocks of each group, its null block included, that fit into ``num_bytes`` together.

    The first group, which reaches farthest, gets as many as possible. The others get what as many requests of a typical
    length keep in them as the first one holds (``max_num_seqs`` at most), beside the tokens of a step, which its requests
    share; and never less than one request of any length needs. With one group, all is that one's.
    """
    chunk = workload.max_num_batched_tokens
    typical = min(workload.max_model_len, TYPICAL_TOKENS)
    first, *others = layout.groups
    size = first.layout.block_size

    def with_first(num_blocks: int) -> tuple[int, ...]:
        num_tokens = (num_blocks - 1) * size
        num_requests = min(max(-(-num_tokens // typical), _LEAST_REQUESTS), workload.max_num_seqs)
        longest = min(workload.max_model_len, num_tokens)
        numbers = [num_blocks]
        for group in others:
            kept = num_requests * group.max_blocks(typical, 1) + -(-chunk // size)
            # Never more than the first group: then no request keeps more here than there.
            numbers.append(min(num_blocks, 1 + max(kept, group.max_blocks(longest, chunk))))
        return tuple(numbers)

    def is_too_much(num_blocks: int) -> bool:
        numbers = zip(with_first(num_blocks), layout.groups, strict=True)
        return sum(number * group.layout.block_bytes for number, group in numbers) > num_bytes

    most = num_bytes // first.layout.block_bytes
    return with_first(max(0, bisect_left(range(most + 1), True, lo=1, key=is_too_much) - 1))


def share_with_states(
    layout: CacheLayout, num_bytes: int, workload: Workload, states: StateNeeds
) -> tuple[tuple[int, ...], int, int]:
    """Return the number of blocks of each group, see ``share_memory``, that of slots for states, and of spare ones of these.

    As many requests as fit with what they hold of a text of a typical length and a slot get one, ``max_num_seqs`` at most.
    The blocks have the rest. Raises SettingError, with all numbers, if two requests do not fit beside the snapshots.
    """
    slot_bytes = states.layout.slot_bytes
    # A text has its length at its end only. Where its prompt is half of it, a request holds three quarters on average.
    typical = min(workload.max_model_len, TYPICAL_TOKENS) * 3 // 4
    text_bytes = sum(group.max_blocks(typical, 1) * group.layout.block_bytes for group in layout.groups)
    num_left = num_bytes - states.num_snapshots * slot_bytes
    num_requests = min(max(num_left // (slot_bytes + text_bytes), _LEAST_REQUESTS), workload.max_num_seqs)
    while num_requests > _LEAST_REQUESTS and (
        num_requests * (slot_bytes + text_bytes) + states.num_spares(num_requests) * slot_bytes > num_left
    ):
        num_requests -= 1
    num_spares = states.num_spares(num_requests)
    num_left -= (num_requests + num_spares) * slot_bytes
    num_slots = num_requests + states.num_snapshots + num_spares
    per_block = layout.groups[0].layout.block_bytes
    if not per_block and num_left >= 0:
        per_text = -(-workload.max_model_len // states.block_size)
        return (1 + max(per_text, min(num_requests * per_text, _MOST_EMPTY_BLOCKS)),), num_slots, num_spares
    num_blocks = share_memory(layout, max(0, num_left), workload) if per_block else (0,)
    if min(num_blocks) < 2:  # the null block, and one to compute with
        raise SettingError(
            f"there are {num_bytes} bytes for the KV cache; the states of {num_requests} requests, {states.num_snapshots} "
            f"snapshots and {num_spares} drafts need {num_slots} slots of {slot_bytes} bytes ({num_slots * slot_bytes} "
            f"bytes), and a block of KV has {per_block}: raise kv_cache_bytes, or lower state_snapshots",
            param="kv_cache_bytes",
        )
    return num_blocks, num_slots, num_spares
