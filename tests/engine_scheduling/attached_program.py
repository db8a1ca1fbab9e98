"""A program with a further client of an engine: ``ADDRESS TASK``. It prints lines of JSON, and ends when its input does.

A number: prints the answers to eight requests that it starts at once. many: starts more requests than any test waits for,
prints a line when the first has an output, and another with the error kinds of their ends.
"""

import asyncio
import json
import sys
from typing import Any

from contract.outputs import EngineOutput
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.attaching import AttachedClient
from engine.client import EngineClient

NUM_MANY = 400
NUM_MANY_TOKENS = 200


def request_of(name: str, prompt: list[int], max_tokens: int, logprobs: int | None = None) -> EngineRequest:
    """Return a request of a few fields; the modules of the tests' other requests take seconds to load."""
    sampling = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)


def own_prompt(salt: int, index: int) -> list[int]:
    """Return the prompt of a client's request, which differs from those of other clients' requests with the same name."""
    return [100 * salt + index] * (index + 1)


async def answer_of(client: EngineClient, request: EngineRequest) -> tuple[list[int], EngineOutput]:
    """Return the tokens of a choice, and its last output."""
    tokens: list[int] = []
    async for output in client.generate(request):
        tokens += output.token_ids
    return tokens, output


async def answers(client: EngineClient, salt: int) -> list[list[int]]:
    """Return the answers to eight requests, whose names are the same for all clients."""
    requests = [request_of(f"r{index}", own_prompt(salt, index), max_tokens=40) for index in range(8)]
    return [tokens for tokens, _ in await asyncio.gather(*(answer_of(client, one) for one in requests))]


async def many(client: EngineClient) -> set[str | None]:
    """Start many long requests; return the error kinds of their ends."""
    for index in range(NUM_MANY):
        request = request_of(f"r{index}", [index], max_tokens=NUM_MANY_TOKENS, logprobs=20)
        await client.add_request(request)
    kinds, has_begun = set(), False
    async for outputs in client.steps():
        if not has_begun:
            has_begun = True
            show(True)
        kinds |= {output.error_kind for output in outputs if output.is_leg_finished}
    return kinds


def show(value: Any) -> None:
    """Print one line."""
    print(json.dumps(value), flush=True)  # noqa: T201


async def main(address: str, task: str) -> None:
    client = await AttachedClient.attach(address)
    if task == "many":
        show(sorted(map(str, await many(client))))
    else:
        show(await answers(client, int(task)))
        await asyncio.to_thread(sys.stdin.read)
    await client.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
