"""Matchers over the tests' tiny tokenizer, and what their bitmasks allow."""

import threading
from pathlib import Path
from typing import Any

import numpy as np

from contract.errors import KvbatonError
from contract.requests import EngineRequest
from contract.sampling import Grammar, SamplingParams
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.matcher import GrammarMatcher
from engine.grammar.vocabulary import load_vocabulary
from tests.text.tiny_model import END, byte_ids

VOCAB_SIZE = 300
WAIT_SECONDS = 30.0


def asking(grammar: Grammar, *, delivered: str = "", **sampling: Any) -> EngineRequest:
    """A request with this grammar; ``delivered`` ends its prompt, a token a byte."""
    tokens = byte_ids(delivered.encode())
    fields = {"max_tokens": 100, **sampling}
    return EngineRequest(
        request_id="r",
        prompt_token_ids=[2, 3, *tokens],
        sampling=SamplingParams(grammar=grammar, **fields),
        first_index=len(tokens),
        eos_token_ids=(END,),
    )


def outcome_of(folder: Path, asked: EngineRequest) -> GrammarMatcher | KvbatonError:
    """What the compiler makes of it."""
    compiler = GrammarCompiler(lambda: load_vocabulary(folder, [END]), VOCAB_SIZE)
    found: list[GrammarMatcher | KvbatonError] = []
    is_ready = threading.Event()

    def take(outcome: GrammarMatcher | KvbatonError) -> None:
        found.append(outcome)
        is_ready.set()

    assert asked.sampling.grammar
    try:
        compiler.start(asked, asked.sampling.grammar, take)
        assert is_ready.wait(WAIT_SECONDS)
    finally:
        compiler.close()
    return found[0]


def matcher_of(folder: Path, asked: EngineRequest) -> GrammarMatcher:
    """The same where it compiles. Raises its error where it does not."""
    outcome = outcome_of(folder, asked)
    if isinstance(outcome, KvbatonError):
        raise outcome
    return outcome


def allowed_by(matcher: GrammarMatcher) -> set[int]:
    """The tokens that may follow."""
    bits = np.unpackbits(matcher.bitmask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def ids_of(characters: str) -> set[int]:
    """The tokens that stand for one of these characters each."""
    return set(byte_ids(characters.encode()))
