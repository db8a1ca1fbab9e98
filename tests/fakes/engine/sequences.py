"""The requests of a fake runner, and the states of a fake model with recurrent layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from contract.requests import PoolingParams
from contract.sampling import SamplingParams
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
    """By slot: the number of absorbed tokens, and the code of the last one. Every misuse of a slot is detected."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[int, int]] = {}

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots, (from, to), one after the other."""
        for source, target in pairs:
            self._states[target] = self._states[source]

    def absorb(self, table: Sequence[int], codes: Sequence[int], start: int, end: int) -> None:
        """Advance the slot of a request, which must have absorbed the tokens before ``start``, and no others."""
        (slot,) = table
        assert slot > 0
        if start:
            assert self._states[slot] == (start, codes[start - 1]), "it is another text's state"
        self._states[slot] = end, codes[end - 1]
