"""Measures the work of the router's event loop per token, with the largest inputs that a client may send.

    python -m benchmarks.token_path [MODEL_FOLDER]

Prints microseconds of CPU time per token: the median of five runs of 4,000 tokens. docs/security.md has a table of them.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from contract.outputs import TokenLogprobs
from router.answers.answer import Answer
from router.intake.limits import MAX_ALL_STOP_CHARACTERS, MAX_STOP_CHARACTERS, MAX_STOPS
from router.intake.prepared_request import prepare
from router.intake.request import GenerationRequest
from router.tokens.delivery import Token, TokenBatch
from text.model_card import ModelCard
from text.stop import StopAutomaton, StopStrings

NUM_TOKENS = 4000
NUM_RUNS = 5
DEMO = Path(__file__).parents[1] / "kvbaton" / "demo_model"
MANY_STOPS = ["a" * (MAX_ALL_STOP_CHARACTERS // MAX_STOPS - 1) + chr(0x100 + i) for i in range(MAX_STOPS)]
LONG_STOPS = [
    "a" * (MAX_STOP_CHARACTERS - 1) + chr(0x100 + i)
    for i in range(MAX_ALL_STOP_CHARACTERS // MAX_STOP_CHARACTERS)
]


def per_token(run: Callable[[], object]) -> float:
    """Return the microseconds per token of a run of ``NUM_TOKENS``."""
    seconds = []
    for _ in range(NUM_RUNS):
        begin = time.process_time()
        run()
        seconds.append(time.process_time() - begin)
    return median(seconds) / NUM_TOKENS * 1e6


def stopping(stops: list[str], piece: str) -> Callable[[], object]:
    """Return a run that searches stop strings in an answer that repeats one piece."""
    automaton = StopAutomaton(stops)

    def run() -> None:
        matcher = StopStrings(automaton)
        for _ in range(NUM_TOKENS):
            matcher.push(piece)

    return run


def answering(card: ModelCard, stops: list[str], num_logprobs: int | None) -> Callable[[], object]:
    """Return a run that makes the complete delta of each token: text, stop strings, log probabilities."""
    ids = card.tokenizer.encode("aaaa and hello again, café 😀 ", add_special_tokens=False)
    asked = GenerationRequest(
        request_id="r", prompt="hello", stop=tuple(stops), max_tokens=NUM_TOKENS, logprobs=num_logprobs
    )
    request = prepare(asked, ids, card, NUM_TOKENS * 2, 60.0)
    best = tuple(range(20))
    logprobs = TokenLogprobs(1, -1.0, 1, best, tuple(-float(n) for n in best)) if num_logprobs else None

    def run() -> None:
        answer = Answer(request, card)
        for index in range(NUM_TOKENS):
            answer.push(TokenBatch([Token(index, ids[index % len(ids)], logprobs)]))

    return run


def main() -> None:
    """Print the table."""
    card = ModelCard.from_folder(Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO)
    rows = {
        "stop strings: 64 of 64 characters, a piece of 4": stopping(MANY_STOPS, "aaaa"),
        "stop strings: 4 of 1,024 characters, a piece of 4": stopping(LONG_STOPS, "aaaa"),
        "stop strings: 4 of 1,024 characters, a piece of 16": stopping(LONG_STOPS, "a" * 16),
        "whole delta, no stop strings": answering(card, [], None),
        "whole delta, 64 stop strings, 20 log probabilities": answering(card, MANY_STOPS, 20),
    }
    for name, run in rows.items():
        print(f"{per_token(run):6.1f}  {name}")


if __name__ == "__main__":
    main()
