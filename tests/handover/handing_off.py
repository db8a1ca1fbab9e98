"""Prompts whose KV is handed over, and a request that is handed off to another engine, as the router does both."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from contract.outputs import EngineOutput
from contract.requests import EngineRequest, HandOff, ReceiveTransfer
from contract.sampling import SamplingParams
from engine.client import EngineClient
from tests.checkpoints import load_reference, reference_greedy
from tests.engine_pair import EnginePair, outputs_of, tokens_of

NUM_TOKENS = 12
SHARED = [(37 * i + 11) % 256 for i in range(24)]
PROMPTS = [[7], SHARED, [*SHARED, *range(60, 81)], [*SHARED, *range(90, 107)], list(range(100, 105))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def expected(
    folder: Path, prompts: Sequence[list[int]] = PROMPTS, num_tokens: int = NUM_TOKENS
) -> list[list[int]]:
    """Return the greedy tokens of transformers behind each prompt."""
    reference = load_reference(folder)
    return [reference_greedy(reference, prompt, num_tokens) for prompt in prompts]


async def answers_of(
    pair: EnginePair, prompts: Sequence[list[int]] = PROMPTS, name: str = "r"
) -> list[list[int]]:
    """Return the tokens behind each prompt, one prompt after the other."""
    answers = []
    for index, prompt in enumerate(prompts):
        send, receive = pair.legs(f"{name}{index}", prompt, GREEDY)
        first = await outputs_of(pair.prefill, send)
        answers.append(tokens_of(first, await outputs_of(pair.decode, receive)))
    return answers


async def choices_of(
    pair: EnginePair, prompts: Sequence[list[int]], num_choices: int
) -> list[list[list[int]]]:
    """Return the tokens of each choice behind each prompt, all asked at once."""
    asked = [
        pair.ask(f"many-{index}", prompt, GREEDY, num_choices=num_choices)
        for index, prompt in enumerate(prompts)
    ]
    return [
        [
            [token for one in (*first, *rest) if one.choice == choice for token in one.token_ids]
            for choice in range(num_choices)
        ]
        for first, rest in await asyncio.gather(*asked)
    ]


@dataclass
class Moving:
    """One choice of a request, whose outputs of all engines are collected in order."""

    request: EngineRequest
    outputs: list[EngineOutput] = field(default_factory=list)
    attempt: int = 0
    num_moves: int = 0

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def end(self) -> EngineOutput:
        return self.outputs[-1]

    async def run(self, engine: EngineClient, request: EngineRequest, num_tokens: int | None = None) -> None:
        """Run on an engine until the end, or hand the request off after ``num_tokens`` more tokens or a few more."""
        goal = None if num_tokens is None else len(self.tokens) + num_tokens
        handing: asyncio.Task[None] | None = None
        async for output in engine.generate(request):
            self.outputs.append(output)
            if goal is not None and handing is None and len(self.tokens) >= goal:
                handing = asyncio.create_task(engine.hand_off(self.order(), 60.0))
        if handing is not None:
            await handing
            assert self.end.handed_over and self.end.first_index == len(self.tokens)

    def order(self) -> HandOff:
        """Return the order that hands the running attempt off."""
        return HandOff(
            request_id=self.request.request_id,
            attempt=self.attempt,
            choice=self.request.choice,
            transfer_id=f"moved-{self.request.request_id}.{self.request.choice}.{self.attempt}",
            next_attempt=self.attempt + 1,
        )

    def next_leg(self, source: EngineClient, boot_id: str) -> EngineRequest:
        """Return the request that another engine continues with, once this one was handed off."""
        transfer = ReceiveTransfer(
            transfer_id=self.order().transfer_id,
            peer_worker_id=boot_id.removeprefix("boot-"),
            peer_boot_id=boot_id,
            peer_control=source.info.control_address,
        )
        self.attempt += 1
        self.num_moves += 1
        return msgspec.structs.replace(
            self.request,
            attempt=self.attempt,
            prompt_token_ids=[*self.request.prompt_token_ids, *self.tokens[:-1]],
            first_index=len(self.tokens),
            transfer=transfer,
        )


async def ping_pong(
    engines: list[tuple[EngineClient, str]], request: EngineRequest, num_tokens: int, num_moves: int
) -> Moving:
    """Run a request on the engines (each with its boot id) in turn: it is moved after ``num_tokens``, so many times."""
    moving = Moving(request)
    leg = request
    for place in range(num_moves):
        engine, boot_id = engines[place % len(engines)]
        await moving.run(engine, leg, num_tokens)
        leg = moving.next_leg(engine, boot_id)
    await moving.run(engines[num_moves % len(engines)][0], leg)
    return moving


async def check_replays(
    pair: EnginePair, prompt: list[int], answer: list[int], sampling: SamplingParams
) -> None:
    """Law 5: check a replay with the delivered tokens at the prompt's end, at each position of an answer."""
    for done in range(1, len(answer) - 1):
        legs = await pair.ask(f"replay-{done}", [*prompt, *answer[:done]], sampling, first_index=done)
        assert tokens_of(*legs) == answer[done:]


async def check_moves(pair: EnginePair, prompt: list[int], answer: list[int]) -> None:
    """Check that no token of an answer changes in three moves, and that nothing is left."""
    sampling = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
    request = EngineRequest(request_id="moving", prompt_token_ids=prompt, sampling=sampling)
    engines = [(pair.prefill, "boot-prefill"), (pair.decode, "boot-decode")]
    moving = await ping_pong(engines, request, num_tokens=9, num_moves=3)
    await pair.until_free()
    assert moving.num_moves == 3
    assert moving.tokens == answer
