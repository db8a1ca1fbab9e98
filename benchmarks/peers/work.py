"""The common part of this folder's programs: orders as lines of JSON on standard input, answers on standard output.

The first order is the ``Load``, answered with facts about the engine; every other one is a ``Batch``, answered with the
seconds and the tokens. Standard output is reserved for answers: output of libraries goes to standard error. Only the
standard library is used here, since the module runs in every environment.
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
    """A checkpoint's folder, the number of threads, and the maximum number of tokens and concurrent prompts.

    artefact: a folder in which the program may store the checkpoint in its own format for later runs.
    """

    model: str
    num_threads: int
    max_model_len: int
    max_num_seqs: int
    artefact: str


Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Prompts]
"""Maps (prompts as token ids, number of new tokens) to the new tokens; greedy, end tokens do not end an answer."""
Start = Callable[[Load], tuple[Generate, dict[str, Any]]]
"""Maps a load to the loaded engine and facts: versions and implementation."""


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
    """Run the batches of an order in sequence and return their seconds. Raises ValueError for a wrong number of tokens."""
    num_tokens: int = order["num_tokens"]
    begin = time.perf_counter()
    found = [generate(batch, num_tokens) for batch in order["batches"]]
    seconds = time.perf_counter() - begin
    lengths = {len(tokens) for batch in found for tokens in batch}
    if lengths != {num_tokens}:
        raise ValueError(f"expected {num_tokens} tokens, got {sorted(lengths)}")
    return {"seconds": seconds, "token_ids": found if order["wants_tokens"] else None}


def _die_with_parent() -> None:
    """End with the parent: a stopped process would stay for ever if the process that resumes it was killed."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")


def _kept_output() -> TextIO:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
