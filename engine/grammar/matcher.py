"""The state of one answer in its grammar, and the tokens that may follow."""

import re
import time
from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from contract.errors import InternalError, InvalidRequestError, KvbatonError
from contract.requests import EngineRequest
from engine.grammar.machine import Machine

_INTERNALS = re.compile("<(?:non-verbose/|state|backtrace)>")
_MAX_REASON_LENGTH = 400
_NOTHING_FOLLOWS = "NoExtension"
_PANIC = "panic"


class GrammarMatcher:
    """One request's state in its grammar. Used by one thread at a time.

    The grammar decides which tokens may follow, except those that end the answer: they are allowed where the grammar may
    end, from ``min_tokens`` on, and stop tokens also where the grammar contains them. ``allowed_token_ids`` applies as well.
    If no token is left, a matching answer ``is_complete``.

    num_tokens: the answer's tokens so far. bitmask: int32 ``[ceil(vocab_size / 32)]``; token t may follow if bit t % 32 of
    word t // 32 is set. Both are valid after the first ``advance`` only.
    """

    def __init__(
        self, machine: Machine, library_ends: Iterable[int], engine_request: EngineRequest, vocab_size: int
    ) -> None:
        sampling = engine_request.sampling
        self.num_tokens = 0
        self.is_complete = False
        self.bitmask: NDArray[np.int32] = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._shared = machine
        machine.users.add(self)
        self._machine = machine.copy()
        self._min_tokens = sampling.min_tokens
        self._no_text = ~_bits([*library_ends, *engine_request.eos_token_ids], vocab_size)
        self._ends = _bits(sampling.end_token_ids(engine_request.eos_token_ids), vocab_size)
        allowed = sampling.allowed_token_ids or range(vocab_size)
        self._allowed = _bits(allowed, vocab_size)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append these tokens to the answer (none: begin it).

        Raises InvalidRequestError if the grammar turns out to be too complex or no token may follow, InternalError for a
        token that may not follow.
        """
        num_taken = self._machine.try_consume_tokens(list(token_ids))
        self._check()
        if num_taken < len(token_ids):
            raise InternalError(
                f"token {token_ids[num_taken]}, number {self.num_tokens + num_taken} of the answer, does not match "
                "the grammar"
            )
        self.num_tokens += num_taken
        begun = time.thread_time()  # not the wall clock: the machine's growth is estimated from it
        bits = self._following()
        self._shared.grow(num_taken, time.thread_time() - begun)
        self.bitmask = bits.view(np.int32)
        if bits.any():
            return
        if not self._machine.is_accepting():
            raise InvalidRequestError(
                f"no token can follow in the grammar after {self.num_tokens} tokens (min_tokens and allowed_token_ids "
                "count as well)",
                param="grammar",
            )
        self.is_complete = True

    def masks_behind(self, token_ids: Sequence[int]) -> list[NDArray[np.int32]]:
        """Return the tokens that may follow behind the first of these tokens, behind the first two, and so on.

        The list ends before a token that may not follow, or behind which none may. The answer's state does not change.
        """
        masks: list[NDArray[np.int32]] = []
        if self.is_complete:
            return masks
        walker = copy(self)
        walker._machine = self._machine.deep_copy()
        for token in token_ids:
            if not walker.bitmask[token // 32] >> (token % 32) & 1:
                break
            try:
                walker.advance([token])
            except KvbatonError:  # the answer will never hold this token, or ends with it
                break
            if walker.is_complete:
                break
            masks.append(walker.bitmask)
        return masks

    def fork(self) -> "GrammarMatcher":
        """Return a copy in the same state, for another answer."""
        other = copy(self)
        self._shared.users.add(other)
        other._machine = self._machine.deep_copy()
        return other

    def _following(self) -> NDArray[np.uint32]:
        of_library = np.frombuffer(self._machine.compute_bitmask(), dtype=np.uint32)
        self._check()
        # The library's vocabulary may be smaller than the model's, or larger.
        bits = np.zeros_like(self._ends)
        num_words = min(len(bits), len(of_library))
        bits[:num_words] = of_library[:num_words]
        bits &= self._no_text
        if self.num_tokens < self._min_tokens:
            bits &= ~self._ends
        elif self._machine.is_accepting():
            bits |= self._ends
        bits &= self._allowed
        return bits

    def _check(self) -> None:
        if not self._machine.is_error():
            return
        self._shared.has_failed = True
        reason = reason_of(self._machine)
        place = f"after {self.num_tokens} tokens of the answer" if self.num_tokens else "at its start"
        if reason.startswith(_NOTHING_FOLLOWS):
            ours = f"no text can follow in the grammar {place}: a part of it matches no text"
        elif reason.startswith(_PANIC):
            ours = f"the grammar cannot be followed {place}; write it in another way"
        else:
            ours = f"the grammar is too complex: {place}, what may follow takes more work than this service allows"
        raise InvalidRequestError(ours, param="grammar")


def reason_of(machine: LLMatcher) -> str:
    """Return the library's error message without its internals."""
    return _INTERNALS.split(machine.get_error())[0].strip()[:_MAX_REASON_LENGTH]


def _bits(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    """Return the set of these tokens as a bitmask, without those beyond the vocabulary."""
    is_member = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    is_member[[token for token in token_ids if token < vocab_size]] = True
    return np.packbits(is_member, bitorder="little").view(np.uint32)
