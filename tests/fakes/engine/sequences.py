"""The requests of a fake runner, and the states of a fake model with recurrent layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from contract.requests import PoolingParams
from contract.sampling import SamplingParams
from engine.kv_cache.startup import KVCacheConfig
from tests.fakes.engine.memory import prefix_codes


@dataclass
class FakeSequence:
    """A request: its tokens, the code of each prefix, and its tables.

    has_sampled: a token was sampled since its KV was computed from the start, or received.
    """

    token_ids: list[int]
    codes: list[int]
    tables: list[list[int]]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_prompt_tokens: int = 0
    num_choices: int = 1
    pooling: PoolingParams | None = None
    pooled_codes: list[int] = field(default_factory=list)
    has_sampled: bool = False

    def append(self, token_id: int) -> None:
        self.has_sampled = True
        self.token_ids.append(token_id)
        self.codes.append(prefix_codes(self.token_ids)[-1])


class FakeStates:
    """By slot: the number of absorbed tokens, and the code of the last one. Every misuse of a slot is detected.

    A slot has one piece, by which it is handed over. A slot that is being read into has no state. spares: the slots for
    states before drafts, as many as requests may have drafts in a step.
    """

    def __init__(self, spares: Sequence[int] = ()) -> None:
        self._states: dict[int, tuple[int, int]] = {}
        self._reading: set[int] = set()
        self._spares = spares
        self._num_drafted = 0

    @classmethod
    def of(cls, config: KVCacheConfig) -> "FakeStates | None":
        """Return the slots of an allocation; None without any."""
        end = config.num_state_slots + 1
        return cls(range(end - config.num_spare_slots, end)) if config.cache.states else None

    def begin(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Begin a step, which copies these slots before."""
        self.copy(pairs)
        self._num_drafted = 0

    def note_drafts(self, table: Sequence[int]) -> None:
        """Keep what a request with drafts has absorbed in a spare slot, which must be no other request's."""
        assert self._num_drafted < len(self._spares), "a step has drafts of too many requests"
        self.copy([(table[0], self._spares[self._num_drafted])])
        self._num_drafted += 1

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots, (from, to), one after the other."""
        for source, target in pairs:
            assert not {source, target} & self._reading, "a slot is copied while a read writes into it"
            self._states[target] = self._states[source]

    def begin_reading(self, pieces: Sequence[int]) -> None:
        """Let a read write into a slot, until ``land`` or ``scribble``."""
        (piece,) = pieces
        assert piece + 1 not in self._reading
        self._reading.add(piece + 1)
        self._states.pop(piece + 1, None)

    def land(self, pieces: Sequence[int], codes: Sequence[int]) -> None:
        """Complete a read: the states behind these tokens have arrived."""
        (piece,) = pieces
        self._reading.remove(piece + 1)
        self._states[piece + 1] = len(codes), codes[-1]

    def find(self, piece: int) -> tuple[int, int] | None:
        """Return the state of a slot: the number of tokens, and the code of the last one; None if it has none."""
        return self._states.get(piece + 1)

    def fill(self, piece: int, state: tuple[int, int]) -> None:
        """Complete a read of a state."""
        self._reading.remove(piece + 1)
        self._states[piece + 1] = state

    def scribble(self, pieces: Sequence[int]) -> None:
        """End a read, which leaves garbage."""
        (piece,) = pieces
        self._reading.discard(piece + 1)
        self._states[piece + 1] = -1, -1

    def check(self, pieces: Sequence[int], num_tokens: int, code: int | None = None) -> None:
        """Assert that a slot has absorbed so many tokens. code: that of the last one."""
        (piece,) = pieces
        found = self._states[piece + 1]
        assert found == (num_tokens, found[1] if code is None else code), "other states are lent"

    def note_received(self, pieces: Sequence[int], num_tokens: int) -> None:
        """See StateRecord; ``land`` has recorded it."""
        self.check(pieces, num_tokens)

    def absorb(self, table: Sequence[int], codes: Sequence[int], start: int, end: int) -> None:
        """Advance the slot of a request, which must have absorbed the tokens before ``start``, and no others."""
        (slot,) = table
        assert slot > 0 and slot not in self._reading
        if start:
            assert self._states[slot] == (start, codes[start - 1]), "it is another text's state"
        self._states[slot] = end, codes[end - 1]
