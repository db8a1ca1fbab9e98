"""Hand-overs of models with windows: only what a window reaches crosses, and the tokens stay equal."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import ErrorKind
from engine.info import EngineInfo
from tests.checkpoints import make_checkpoint, make_foreign_checkpoint
from tests.engine_pair import Sides, running_pair, tokens_of
from tests.handover.handing_off import (
    GREEDY,
    NUM_TOKENS,
    PROMPTS,
    SHARED,
    answers_of,
    check_moves,
    check_replays,
    choices_of,
    expected,
)
from tests.kv_transfer.fakes import CorruptingReceiver

FAMILIES = {"gemma2": 2, "gemma3": 2, "gpt_oss": 2, "llama4": 2, "mistral": 1}
"""With their numbers of groups."""
BLOCK_SIZE = 4
SETTINGS: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_num_seqs": 32, "max_model_len": 120}


def make(folder: Path, family: str) -> Path:
    torch.set_num_threads(1)
    if family == "mistral":
        return make_checkpoint(folder, family, seed=3, sliding_window=6)
    return make_foreign_checkpoint(folder, family, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("checkpoint"), "gemma3")


def moved_bytes(info: EngineInfo, prompts: list[list[int]], num_cached: list[int]) -> tuple[int, int]:
    """Return the blocks and the bytes that cross, by arithmetic. num_cached: blocks of each prompt at the receiver."""
    num_blocks = num_bytes = 0
    for prompt, cached in zip(prompts, num_cached, strict=True):
        for group in info.groups:
            count = len([place for place in group.seen_blocks(len(prompt)) if place >= cached])
            num_blocks += count
            num_bytes += count * group.layout.block_bytes
    return num_blocks, num_bytes


@pytest.mark.parametrize(
    ("family", "transport", "chunk"),
    [
        ("gemma3", "shm", 7),
        ("mistral", "tcp", 32),
        pytest.param("gemma2", "tcp", 7, marks=pytest.mark.slow),
        pytest.param("gemma3", "nixl", 32, marks=pytest.mark.slow),
        pytest.param("gemma3", "nccl", 7, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "shm", 32, marks=pytest.mark.slow),
        pytest.param("llama4", "tcp", 7, marks=pytest.mark.slow),
        pytest.param("mistral", "shm", 7, marks=pytest.mark.slow),
    ],
)
async def test_what_windows_reach_crosses(tmp_path: Path, family: str, transport: str, chunk: int) -> None:
    """Prompts in chunks, then a second turn of each chat; every block and byte is the plan's."""
    folder = make(tmp_path, family)
    answers = expected(folder)
    turns = [[*prompt, *answer, 1, 2, 3] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    further = expected(folder, turns)
    settings = {**SETTINGS, "max_num_batched_tokens": chunk}
    async with running_pair(folder, sides=Sides(transport=transport), **settings) as pair:
        info = pair.decode.info
        assert len(info.groups) == FAMILIES[family]
        assert info.groups[-1].window is not None
        assert await answers_of(pair, PROMPTS) == answers
        found = await pair.decode.call("counters")
        assert await answers_of(pair, turns, "turn") == further
        later = await pair.decode.call("counters")
        await pair.until_free()
    # The shared tokens end a block, behind which the next request sees what the second one has received.
    cached = [0, 0, 6, 6, 0]
    named = [f"transfer_{what}_total{{transport={transport}}}" for what in ("blocks", "bytes")]
    assert tuple(found[name] for name in named) == moved_bytes(info, PROMPTS, cached)
    num_bytes = later[named[1]] - found[named[1]]
    assert num_bytes < moved_bytes(info, turns, [0] * len(turns))[1]
    assert later["cached_tokens_total"] >= sum(map(len, turns)) - len(turns) * (3 + 2 * BLOCK_SIZE)


async def test_choices_and_preempted_answers_are_those_of_generate(model: Path) -> None:
    """Many at once, n = 2, through pools that do not hold them all."""
    prompts = [*PROMPTS[1:], *([index, *SHARED] for index in range(6))]
    small = {**SETTINGS, "max_num_batched_tokens": 13, "kv_cache_bytes": 45_000}
    async with running_pair(model, sides=Sides(transport="shm"), **small) as pair:
        info = pair.decode.info
        answers = await choices_of(pair, prompts, 2)
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert len(info.groups) == 2
    assert answers == [[answer, answer] for answer in expected(model, prompts)]
    assert counters["num_preemptions_total"] > 0


async def test_an_answer_goes_on_where_another_worker_stopped(model: Path) -> None:
    """Law 5: a replay with the delivered tokens at the prompt's end, at each position."""
    async with running_pair(model, **SETTINGS) as pair:
        await check_replays(pair, PROMPTS[2], expected(model)[2], GREEDY)


async def test_an_answer_moves_between_workers(model: Path) -> None:
    """Each of three moves hands over what the windows reach of the answer so far, and no token changes."""
    async with running_pair(model, **SETTINGS) as pair:
        await check_moves(pair, SHARED, expected(model, [SHARED], 60)[0])


@pytest.mark.parametrize("block", [0, 5, 6, 7])
async def test_no_answer_from_a_damaged_block(model: Path, block: int) -> None:
    """Law 3: in each group. Blocks 6 and 7 of the transfer are those of the window."""
    damage = partial(CorruptingReceiver, block_index=block)
    async with running_pair(model, damage, **SETTINGS) as pair:
        _, rest = await pair.ask("damaged", SHARED, GREEDY)
        assert (tokens_of(rest), rest[-1].error_kind) == ([], ErrorKind.TRANSFER_FAILED)
        await pair.until_free()


async def test_a_worker_that_keeps_all_tokens_is_refused(model: Path) -> None:
    """With one sentence that names the groups of both."""
    sides = Sides(decode={"keeps_all_tokens": True})
    async with running_pair(model, sides=sides, **SETTINGS) as pair:
        _, rest = await pair.ask("refused", SHARED, GREEDY)
        assert rest[-1].error_kind == ErrorKind.INCOMPATIBLE
        assert rest[-1].error_message is not None
        assert "cache groups: ours are " in rest[-1].error_message
        assert "window of 6 tokens" in rest[-1].error_message


@pytest.mark.parametrize(("prefill", "decode"), [("float32", "bfloat16"), ("bfloat16", "float32")])
async def test_each_group_is_rounded_once(model: Path, prefill: str, decode: str) -> None:
    """Another dtype of the KV: blocks of both groups are converted, and the answers are those of one rounding."""
    sides = Sides({"kv_cache_dtype": prefill}, {"kv_cache_dtype": decode})
    async with running_pair(model, sides=sides, **SETTINGS) as pair:
        answers = await answers_of(pair, PROMPTS[:3])
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * 3
    assert [answer[0] for answer in answers] == [answer[0] for answer in expected(model, PROMPTS[:3])]
    assert counters["transfer_converted_blocks_total"] > counters["transfer_needed_blocks_total"]


SMALL: dict[str, Any] = {"block_size": 4}
LARGE: dict[str, Any] = {"block_size": 16}


@pytest.mark.parametrize(
    ("family", "transport", "chunk", "prefill", "decode"),
    [
        ("gemma3", "shm", 7, SMALL, LARGE),
        ("gemma3", "tcp", 32, LARGE, SMALL),
        pytest.param("gpt_oss", "tcp", 32, SMALL, LARGE, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "shm", 7, LARGE, SMALL, marks=pytest.mark.slow),
        pytest.param("mistral", "tcp", 7, SMALL, LARGE, marks=pytest.mark.slow),
        pytest.param("mistral", "shm", 32, LARGE, SMALL, marks=pytest.mark.slow),
    ],
)
async def test_what_windows_reach_crosses_between_other_blocks(
    tmp_path: Path, family: str, transport: str, chunk: int, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    """The sender's blocks that its windows reach become ours, also in a second turn behind what is cached."""
    folder = make(tmp_path, family)
    answers = expected(folder)
    turns = [[*prompt, *answer, 1, 2, 3] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    settings = {**SETTINGS, "max_num_batched_tokens": chunk}
    async with running_pair(folder, sides=Sides(prefill, decode, transport), **settings) as pair:
        assert await answers_of(pair, PROMPTS[1:2]) == answers[1:2]
        first = await pair.decode.call("counters")
        assert await answers_of(pair, PROMPTS, "all") == answers
        assert await answers_of(pair, turns, "turn") == expected(folder, turns)
        later = await pair.decode.call("counters")
        await pair.until_free()
        info = pair.prefill.info
    name = f"transfer_bytes_total{{transport={transport}}}"
    assert first[name] == moved_bytes(info, PROMPTS[1:2], [0])[1]
    most = [*PROMPTS, *turns]
    assert later[name] - first[name] <= moved_bytes(info, most, [0] * len(most))[1]


async def test_a_block_without_its_first_tokens_is_not_found(model: Path) -> None:
    """The sender's windows reach the last 4 of its 16 tokens; a prompt that ends with it needs one more."""
    prompt = [(31 * i + 5) % 250 for i in range(50)]
    other = [*prompt[:48], 7, 7, 9]
    async with running_pair(model, sides=Sides(SMALL, LARGE), **SETTINGS) as pair:
        assert await answers_of(pair, [prompt]) == expected(model, [prompt])
        before = await pair.decode.call("counters")
        assert await answers_of(pair, [other], "other") == expected(model, [other])
        after = await pair.decode.call("counters")
    assert after["cached_tokens_total"] == before["cached_tokens_total"]
