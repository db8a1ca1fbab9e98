"""An engine for the benchmarks' own tests: the next token is one more than the last."""

import sys
from typing import Any

from benchmarks.peers.work import Generate, Load, Prompts, run_peer

SHORT_OF = 3
"""The number of tokens that a model of the name "short" does not reach."""


def start(load: Load) -> tuple[Generate, dict[str, Any]]:
    sys.stdout.write("what a library prints is not an answer\n")
    if load.model.endswith("unknown"):
        sys.exit("no such model")

    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        if load.model.endswith("short") and num_tokens == SHORT_OF:
            num_tokens -= 1
        return [[prompt[-1] + 1 + number for number in range(num_tokens)] for prompt in prompts]

    return generate, {"computes_with": "counting", "num_threads": load.num_threads}


if __name__ == "__main__":
    run_peer(start)
