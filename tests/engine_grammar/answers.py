"""Matchers over the tests' tiny tokenizer, and the tokens that their bitmasks allow."""

import threading
from pathlib import Path
from typing import Any

import numpy as np

from contract.errors import KvbatonError
from contract.requests import EngineRequest
from contract.sampling import Grammar, SamplingParams
from engine.grammar.building import load_vocabulary
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.matcher import GrammarMatcher
from tests.text.tiny_model import END, byte_ids

VOCAB_SIZE = 300
WAIT_SECONDS = 240.0


def request_with(grammar: Grammar, *, delivered: str = "", **sampling: Any) -> EngineRequest:
    """Return a request with this grammar; ``delivered`` ends its prompt, one token for each byte."""
    tokens = byte_ids(delivered.encode())
    fields = {"max_tokens": 100, **sampling}
    return EngineRequest(
        request_id="r",
        prompt_token_ids=[2, 3, *tokens],
        sampling=SamplingParams(grammar=grammar, **fields),
        first_index=len(tokens),
        eos_token_ids=(END,),
    )


def outcome_of(folder: Path, request: EngineRequest) -> GrammarMatcher | KvbatonError:
    """Compile the request's grammar and return the compiler's outcome."""
    compiler = GrammarCompiler(lambda: load_vocabulary(folder, [END]), VOCAB_SIZE)
    found: list[GrammarMatcher | KvbatonError] = []
    is_ready = threading.Event()

    def take(outcome: GrammarMatcher | KvbatonError) -> None:
        found.append(outcome)
        is_ready.set()

    assert request.sampling.grammar
    try:
        compiler.start(request, request.sampling.grammar, take)
        assert is_ready.wait(WAIT_SECONDS)
    finally:
        compiler.close()
    return found[0]


def matcher_of(folder: Path, request: EngineRequest) -> GrammarMatcher:
    """Return the request's matcher. Raises the error if its grammar does not compile."""
    outcome = outcome_of(folder, request)
    if isinstance(outcome, KvbatonError):
        raise outcome
    return outcome


def allowed_by(matcher: GrammarMatcher) -> set[int]:
    """Return the tokens that may follow."""
    bits = np.unpackbits(matcher.bitmask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def ids_of(characters: str) -> set[int]:
    """Return the tokens of these characters."""
    return set(byte_ids(characters.encode()))
