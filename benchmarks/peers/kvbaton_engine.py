"""kvbaton's engine in one process, with default settings except the number of threads."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.peers.work import Generate, Load, Prompts, run_peer
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.core import EngineCore
from engine.settings import EngineSettings


def start(load: Load) -> tuple[Generate, dict[str, Any]]:
    """Load the engine; see ``Start``."""
    settings = EngineSettings(model=Path(load.model), dtype="bfloat16", num_threads=load.num_threads)
    with _log_of("engine.compute.forward") as messages:
        core = EngineCore(settings)
    numbers = count()

    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        answers: dict[str, list[int]] = {}
        for prompt in prompts:
            request = EngineRequest(request_id=str(next(numbers)), prompt_token_ids=prompt, sampling=sampling)
            answers[request.request_id] = []
            core.add_request(request)
        while core.needs_step():
            for output in core.step().get(0, []):
                answers[output.request_id] += output.token_ids
        return list(answers.values())

    return generate, {"computes_with": messages, "num_threads": load.num_threads}


@contextmanager
def _log_of(name: str) -> Iterator[list[str]]:
    """Collect the records of this logger, in which the engine names the implementation of the model."""
    messages: list[str] = []
    logger = logging.getLogger(name)
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


if __name__ == "__main__":
    run_peer(start)
