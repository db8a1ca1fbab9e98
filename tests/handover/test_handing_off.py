"""A running request moves between two real engines while it decodes, and its answer is the undisturbed one."""

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from contract.errors import InvalidRequestError, NotFoundError
from contract.outputs import EngineOutput, FinishReason
from contract.requests import EngineRequest
from contract.sampling import Grammar, SamplingParams, choice_seed
from engine.client import EngineClient, InProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import EOS_ID, make_checkpoint
from tests.engine_pair import EnginePair, Sides, outputs_of, running_pair, tokens_of
from tests.handover.handing_off import Moving, ping_pong

PROMPT = [random.Random(8).randrange(5, 250) for _ in range(41)]
NUM_TOKENS = 96
SEEDED = SamplingParams(temperature=1.3, seed=77, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed=3)


def engines_of(pair: EnginePair) -> list[tuple[EngineClient, str]]:
    return [(pair.prefill, "boot-prefill"), (pair.decode, "boot-decode")]


def request_of(sampling: SamplingParams, name: str = "r", **fields: Any) -> EngineRequest:
    both = {"request_id": name, "prompt_token_ids": PROMPT, **fields}
    return EngineRequest(sampling=sampling, **both)


async def undisturbed(model: Path, *requests: EngineRequest) -> list[list[EngineOutput]]:
    """Return what an engine answers that hands nothing over and caches nothing."""
    settings = EngineSettings(
        model=model, dtype="float32", kv_cache_bytes=16 * 2**20, enable_prefix_caching=False
    )
    client = await InProcessClient.start(settings)
    try:
        return [await outputs_of(client, request) for request in requests]
    finally:
        await client.shutdown()


def assert_same(moving: Moving, whole: list[EngineOutput]) -> None:
    """Equal tokens, each once and in order, with equal log probabilities and end."""
    assert [output.error_message for output in moving.outputs if output.error_message] == []
    indices = [o.first_index + place for o in moving.outputs for place in range(len(o.token_ids))]
    assert indices == list(range(len(indices)))
    assert moving.tokens == tokens_of(whole)
    assert (moving.end.finish_reason, moving.end.stop_reason) == (
        whole[-1].finish_reason,
        whole[-1].stop_reason,
    )
    ours = [entry for output in moving.outputs for entry in output.logprobs or ()]
    theirs = [entry for output in whole for entry in output.logprobs or ()]
    assert [(e.token_id, e.rank, e.top_token_ids) for e in ours] == [
        (e.token_id, e.rank, e.top_token_ids) for e in theirs
    ]


async def test_an_engine_with_nothing_else_to_do_publishes_what_it_lends(model: Path) -> None:
    """No request is left there when the order is to reach the ranks: a step without tokens carries it."""
    async with running_pair(model) as pair:
        moving = Moving(request_of(GREEDY))
        await moving.run(pair.prefill, moving.request, 5)
        async with asyncio.timeout(20):
            while True:
                state = await pair.prefill.call("debug_state")
                (lease,) = state["connector"]["leases"]
                if lease["num_published"] == lease["num_blocks"] > 0:
                    break
                await asyncio.sleep(0.01)
        assert state["requests"] == {} and lease["state"] == "complete" and lease["peer"] is None
        computed = (await pair.prefill.call("counters"))["prompt_tokens_total"]
        assert computed == len(PROMPT), "nothing was computed a second time"
        await pair.prefill.abort("r", 1)
        await pair.until_free()


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {},
    "nucleus": {"top_p": 0.9, "top_k": 60, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "biased": {"logit_bias": ((7, 4.0), (9, 4.5)), "allowed_token_ids": tuple(range(5, 90))},
    "prompt log probabilities": {"prompt_logprobs": 1},
}


@pytest.mark.parametrize("name", CASES)
async def test_moved_again_and_again_the_answer_is_the_undisturbed_one(model: Path, name: str) -> None:
    """There and back, and again: the engines find their own blocks in their caches, and fetch the new ones."""
    request = request_of(msgspec.structs.replace(SEEDED, **CASES[name]))
    (whole,) = await undisturbed(model, request)
    async with running_pair(model) as pair:
        moving = await ping_pong(engines_of(pair), request, num_tokens=6, num_moves=4)
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert_same(moving, whole)
    assert counters["prompt_tokens_total"] == 0 and counters["received_tokens_total"] > len(PROMPT)


async def test_only_what_the_target_lacks_crosses(model: Path) -> None:
    """The target has computed the same prompt before: two full blocks of it are in its cache."""
    request = request_of(SEEDED)
    (whole,) = await undisturbed(model, request)
    async with running_pair(model) as pair:
        await outputs_of(pair.decode, request_of(GREEDY, "before"))
        moving = await ping_pong(engines_of(pair), request, num_tokens=10, num_moves=1)
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert_same(moving, whole)
    (num_moved,) = [output.first_index for output in moving.outputs if output.handed_over]
    assert counters["transfer_needed_blocks_total"] == -(-(len(PROMPT) + num_moved - 1) // 16) - 2


@pytest.mark.parametrize("transport", ["shm", "nixl", "nccl"])
async def test_over_other_transports(model: Path, transport: str) -> None:
    request = request_of(SEEDED)
    (whole,) = await undisturbed(model, request)
    async with running_pair(model, sides=Sides(transport=transport)) as pair:
        moving = await ping_pong(engines_of(pair), request, num_tokens=8, num_moves=3)
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert_same(moving, whole)
    assert counters[f"transfer_blocks_total{{transport={transport}}}"] > 0


@pytest.mark.parametrize(
    "sides",
    [
        Sides(prefill={"block_size": 16}, decode={"block_size": 32}),
        pytest.param(Sides(prefill={"tensor_parallel_size": 2}), marks=pytest.mark.slow),
    ],
    ids=["blocks of 16 and 32", "two ranks and one"],
)
async def test_between_unequal_engines(model: Path, sides: Sides) -> None:
    """Into both directions, since it comes back."""
    request = request_of(GREEDY)
    (whole,) = await undisturbed(model, request)
    async with running_pair(model, sides=sides) as pair:
        moving = await ping_pong(engines_of(pair), request, num_tokens=7, num_moves=3)
        await pair.until_free()
    assert_same(moving, whole)


async def test_a_grammar_continues_where_it_was(model: Path) -> None:
    grammar = Grammar("regex", r"[a-z]{3}(-[0-9]{2}){40}")
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=200, grammar=grammar)
    request = request_of(sampling, eos_token_ids=(EOS_ID,))
    (whole,) = await undisturbed(model, request)
    async with running_pair(model) as pair:
        moving = await ping_pong(engines_of(pair), request, num_tokens=5, num_moves=4)
        await pair.until_free()
    assert_same(moving, whole)
    assert moving.end.finish_reason is FinishReason.STOP and moving.num_moves == 4


async def test_a_stop_token_counts_wherever_it_is_sampled(model: Path) -> None:
    """It ends the answer after the move at the same token as before it."""
    (whole,) = await undisturbed(model, request_of(SEEDED))
    tokens = tokens_of(whole)
    late = next(token for place, token in enumerate(tokens) if place > 80 and token not in tokens[:place])
    request = request_of(msgspec.structs.replace(SEEDED, stop_token_ids=(late,), min_tokens=3))
    (stopped,) = await undisturbed(model, request)
    async with running_pair(model) as pair:
        moving = await ping_pong(engines_of(pair), request, num_tokens=6, num_moves=2)
        await pair.until_free()
    assert_same(moving, stopped)
    assert moving.end.stop_reason == late


async def test_choices_move_one_after_another(model: Path) -> None:
    """Three of one prompt, while the others decode on. Each is what it is alone; later ones find the prompt there."""
    alone = [
        request_of(msgspec.structs.replace(SEEDED, seed=choice_seed(77, choice)), f"alone{choice}")
        for choice in range(3)
    ]
    wholes = await undisturbed(model, *alone)
    async with running_pair(model) as pair:
        moves = [Moving(request_of(SEEDED, num_choices=3).of_choice(choice)) for choice in range(3)]
        order = [1, 2, 0]
        async for output in pair.prefill.generate(request_of(SEEDED, num_choices=3)):
            moves[output.choice].outputs.append(output)
            if order and len(moves[order[0]].tokens) >= 8:
                await pair.prefill.hand_off(moves[order.pop(0)].order(), 60.0)
        needed = []
        for moving in (moves[1], moves[2], moves[0]):
            before = await pair.decode.call("counters")
            await moving.run(pair.decode, moving.next_leg(pair.prefill, "boot-prefill"))
            after = await pair.decode.call("counters")
            needed.append(after["transfer_needed_blocks_total"] - before["transfer_needed_blocks_total"])
        await pair.until_free()
    for moving, whole in zip(moves, wholes, strict=True):
        assert_same(moving, whole)
    assert needed[1] <= needed[0] - 1 and needed[2] <= needed[0]


async def test_from_a_decode_leg_on(model: Path) -> None:
    """Prefill to decode by an ordinary hand-over, then back to the first engine while it decodes."""
    (whole,) = await undisturbed(model, request_of(SEEDED))
    async with running_pair(model) as pair:
        send, receive = pair.legs("r", PROMPT, SEEDED)
        moving = Moving(request_of(SEEDED))
        moving.outputs += await outputs_of(pair.prefill, send)
        await moving.run(pair.decode, receive, 9)
        await moving.run(pair.prefill, moving.next_leg(pair.decode, "boot-decode"))
        await pair.until_free()
    assert_same(moving, whole)


async def test_many_move_at_once_through_small_pools(model: Path) -> None:
    """Twelve that need more blocks than a pool has: preempted ones are refused and stay, nothing leaks (law 4)."""
    prompts = [[random.Random(seed).randrange(5, 250) for _ in range(20 + seed)] for seed in range(12)]
    requests = [
        request_of(GREEDY, f"r{number}", prompt_token_ids=prompt) for number, prompt in enumerate(prompts)
    ]
    wholes = await undisturbed(model, *requests)
    async with running_pair(model, kv_cache_bytes=40 * 2 * 2 * 2 * 16 * 16 * 4, max_num_seqs=8) as pair:

        async def moved(request: EngineRequest) -> Moving:
            moving = Moving(request)
            try:
                await moving.run(pair.prefill, request, 5)
            except InvalidRequestError:  # it was preempted, and ends where it is
                return moving
            await moving.run(pair.decode, moving.next_leg(pair.prefill, "boot-prefill"))
            return moving

        answers = await asyncio.gather(*map(moved, requests))
        await pair.until_free()
    assert sum(moving.num_moves for moving in answers) > 0
    for moving, whole in zip(answers, wholes, strict=True):
        assert_same(moving, whole)


@pytest.mark.parametrize("when", ["before the fetch", "with the fetch", "during the answer"])
async def test_a_cancel_at_any_moment_frees_both_sides(model: Path, when: str) -> None:
    """It names the next attempt, to which the lease belongs."""
    async with running_pair(model) as pair:
        moving = Moving(request_of(GREEDY))
        await moving.run(pair.prefill, moving.request, 5)
        leg = moving.next_leg(pair.prefill, "boot-prefill")
        if when == "before the fetch":
            await pair.prefill.abort("r", 1)
        else:
            running = asyncio.create_task(moving.run(pair.decode, leg))
            await asyncio.sleep(0)
            if when == "during the answer":
                async with asyncio.timeout(20):
                    while moving.end.handed_over:
                        await asyncio.sleep(0)
            await asyncio.gather(pair.decode.abort("r", 1), pair.prefill.abort("r", 1))
            await running
            assert moving.end.finish_reason is FinishReason.ABORT or moving.end.error_kind == "cancelled"
        await pair.until_free()
        assert all(state["leases"] == [] for state in await pair.idle_states())


async def test_a_lease_that_nobody_fetches_expires(model: Path) -> None:
    async with running_pair(model, sides=Sides(links={"lease_seconds": 0.3})) as pair:
        moving = Moving(request_of(GREEDY))
        await moving.run(pair.prefill, moving.request, 5)
        await pair.until_free()
        assert (await pair.prefill.call("counters"))["leases_expired_total"] == 1
        await moving.run(pair.decode, moving.next_leg(pair.prefill, "boot-prefill"))
        assert moving.end.finish_reason is FinishReason.ERROR
        await pair.until_free()


async def test_a_request_that_has_ended_is_not_there(model: Path) -> None:
    async with running_pair(model) as pair:
        moving = Moving(request_of(GREEDY))
        await moving.run(pair.prefill, moving.request)
        with pytest.raises(NotFoundError, match="is not here"):
            await pair.prefill.hand_off(moving.order(), 60.0)
        await pair.until_free()
