"""What the programs of this folder share: orders as lines of JSON on standard input, an answer to each on standard output.

The first order is the ``Load``, answered with facts about the engine; every other one is a ``Batch``, answered with the
seconds and the tokens that it took. Standard output is kept for answers: what a library prints goes to standard error.
Only the standard library is used here, since every environment must have it.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Load:
    """A checkpoint's folder, how many threads may compute, and the most that will be asked: tokens and prompts at once.

    artefact: a folder that the program may fill with the checkpoint in its own format, and finds again the next time.
    """

    model: str
    num_threads: int
    max_model_len: int
    max_num_seqs: int
    artefact: str


Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Prompts]
"""(prompts as token ids, number of new tokens) → the new tokens of each; greedy, end tokens do not end an answer."""
Start = Callable[[Load], tuple[Generate, dict[str, Any]]]
"""A load → the engine, ready to answer, and facts: versions, and what it computes with."""


def run_peer(start: Start) -> None:
    """Load, then answer orders until standard input ends."""
    _die_with_parent()
    answers = _kept_output()
    begin = time.perf_counter()
    generate, facts = start(Load(**json.loads(sys.stdin.readline())))
    _answer(answers, {"facts": facts, "load_seconds": time.perf_counter() - begin})
    for line in sys.stdin:
        _answer(answers, _timed(generate, json.loads(line)))


def _timed(generate: Generate, order: dict[str, Any]) -> dict[str, Any]:
    """The seconds of all batches of an order, one after the other. Raises ValueError for a wrong number of tokens."""
    num_tokens: int = order["num_tokens"]
    begin = time.perf_counter()
    found = [generate(batch, num_tokens) for batch in order["batches"]]
    seconds = time.perf_counter() - begin
    lengths = {len(tokens) for batch in found for tokens in batch}
    if lengths != {num_tokens}:
        raise ValueError(f"asked for {num_tokens} tokens, got {sorted(lengths)}")
    return {"seconds": seconds, "token_ids": found if order["wants_tokens"] else None}


def _die_with_parent() -> None:
    """A stopped process would stay for ever where the one that lets it go on was killed."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")


def _kept_output() -> TextIO:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
