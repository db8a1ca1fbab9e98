"""The slots of the states of recurrent layers, each of which one request writes; see ``contract.state_layout``.

The state rule: of each slot it is counted how many tokens it has absorbed, and a step continues a text only from the state
of all tokens before it. Computing KV again gives the same KV, but a state that absorbs a token twice is another text's.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from contract.errors import InternalError
from contract.state_layout import NO_SLOT, StateLayout
from engine.kv_cache.memory import TORCH_DTYPES
from engine.models.recurrent_layers import RecurrentLayers, StateKey, StateStep, key_of

_UNFINISHED = -1


class StateMemory:
    """Owns the slots of one rank, and the number of tokens that each has absorbed. Fulfils ``engine.connector.StateRecord``.

    pool: the memory of all slots, contiguous, on the device. num_spares: the last slots, each for what a request with drafts
    had absorbed before a step. states: see StateStep.
    """

    def __init__(self, layout: StateLayout, num_slots: int, pool: Tensor, num_spares: int = 0) -> None:
        self.num_slots = num_slots
        self._spares = range(num_slots - num_spares + 1, num_slots + 1)
        self._num_pieces = layout.num_pieces
        flat = pool.view(-1).view(torch.uint8)
        self._slots = flat.view(num_slots, layout.slot_bytes)
        self.states: dict[StateKey, Tensor] = {}
        for part, start in layout.placed():
            numbers = flat.view(TORCH_DTYPES[part.dtype])
            size = numbers.element_size()
            strides = [prod(part.shape[axis + 1 :]) for axis in range(len(part.shape))]
            self.states[key_of(part)] = numbers.as_strided(
                (num_slots, *part.shape),
                (layout.slot_bytes // size, *strides),
                numbers.storage_offset() + start // size,
            )
        self._num_tokens = [0] * (num_slots + 1)

    def begin(self, step: StateStep, req_ids: Sequence[str]) -> None:
        """Check the state rule, before a step; its slots have no known state until it is finished. Raises InternalError.

        What requests with drafts have absorbed is copied into the spare slots.
        """
        for slot, start, req_id in zip(step.slots, step.starts, req_ids, strict=True):
            absorbed = self._num_tokens[slot]
            if slot != NO_SLOT and start and absorbed != start:
                what = "an unfinished step" if absorbed == _UNFINISHED else f"{absorbed} tokens"
                raise InternalError(
                    f"request {req_id!r} continues behind {start} tokens, and its state is that of {what}"
                )
        self.copy([(step.slots[place], spare) for place, spare in self._spares_of(step)])
        for slot in step.slots:
            self._num_tokens[slot] = _UNFINISHED

    def finishing(self, step: StateStep, compute: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
        """Return ``compute``, the rest of a step, with a record of what its slots absorb, unless it is interrupted."""

        def computed() -> Tensor | None:
            hidden = compute()
            if hidden is not None:
                for slot, start, count in zip(step.slots, step.starts, step.counts, strict=True):
                    self._num_tokens[slot] = start + count
            return hidden

        return computed

    def roll_back(self, step: StateStep, num_right: Sequence[int], recurrent: RecurrentLayers) -> None:
        """Remove wrong drafts from the states, behind a step. num_right: of each of ``step.drafted``, its right tokens.

        A request without any has ended: its logits were no numbers.
        """
        for (place, spare), num_tokens in zip(self._spares_of(step), num_right, strict=True):
            if 0 < num_tokens < step.counts[place]:
                slot = step.slots[place]
                self.copy([(spare, slot)])
                recurrent.absorb_again(replace(step, states=self.states), place, num_tokens)
                self._num_tokens[slot] = step.starts[place] + num_tokens

    def check(self, pieces: Sequence[int], num_tokens: int) -> None:
        """See StateRecord."""
        slot = self._slot_of(pieces)
        if self._num_tokens[slot] != num_tokens:
            raise InternalError(
                f"the states behind {num_tokens} tokens are lent, and slot {slot} has absorbed {self._num_tokens[slot]}"
            )

    def note_received(self, pieces: Sequence[int], num_tokens: int) -> None:
        """See StateRecord."""
        self._num_tokens[self._slot_of(pieces)] = num_tokens

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole slots, (from, to), one after the other."""
        for source, target in pairs:
            self._slots[target - 1].copy_(self._slots[source - 1])
            self._num_tokens[target] = self._num_tokens[source]

    def _spares_of(self, step: StateStep) -> list[tuple[int, int]]:
        """Return the places of the requests with drafts, each with a spare slot. Raises InternalError for too many."""
        if len(step.drafted) > len(self._spares):
            raise InternalError(
                f"a step has drafts of {len(step.drafted)} requests, and there are {len(self._spares)} spare slots of states"
            )
        return list(zip(step.drafted, self._spares, strict=False))

    def clear(self, byte: int = 0) -> None:
        """Fill all slots with a byte; none of them is a text's any more."""
        self._slots.fill_(byte)
        self._num_tokens = [0] * (self.num_slots + 1)

    def _slot_of(self, pieces: Sequence[int]) -> int:
        return 1 + pieces[0] // self._num_pieces
