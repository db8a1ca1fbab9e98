"""Hand-overs of models with recurrent layers: the states behind a prompt cross once, whole, and the tokens stay equal."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import ErrorKind
from engine.info import EngineInfo
from tests.checkpoints import write_checkpoint
from tests.engine_pair import Sides, running_pair, tokens_of
from tests.families.tiny_models import make_tiny, tiny_config
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

BLOCK_SIZE = 4
SETTINGS: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_num_seqs": 8, "max_model_len": 120}


def make(folder: Path, family: str) -> Path:
    torch.set_num_threads(1)
    return write_checkpoint(folder, make_tiny(family), 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("checkpoint"), "lfm2")


def moved_bytes(info: EngineInfo, prompts: list[list[int]], num_cached: list[int]) -> int:
    """Return the bytes that cross: KV of the blocks that are not cached, and one slot of each prompt."""
    assert info.states is not None
    num_blocks = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    num_missing = sum(num_blocks) - sum(num_cached)
    return num_missing * info.layout.block_bytes + len(prompts) * info.states.slot_bytes


@pytest.mark.parametrize(
    ("family", "transport", "chunk"),
    [
        ("lfm2", "shm", 7),
        ("qwen3_5_text", "tcp", 32),
        ("mamba2", "shm", 7),
        pytest.param("qwen3_5_text", "nixl", 7, marks=pytest.mark.slow),
        pytest.param("mamba2", "tcp", 32, marks=pytest.mark.slow),
        pytest.param("mamba2", "nixl", 32, marks=pytest.mark.slow),
        pytest.param("lfm2", "nccl", 7, marks=pytest.mark.slow),
        pytest.param("granitemoehybrid", "shm", 32, marks=pytest.mark.slow),
        pytest.param("nemotron_h", "tcp", 7, marks=pytest.mark.slow),
        pytest.param("jamba", "tcp", 32, marks=pytest.mark.slow),
    ],
)
async def test_one_slot_crosses_beside_the_kv(
    tmp_path: Path, family: str, transport: str, chunk: int
) -> None:
    """Prompts in chunks; every byte is the plan's. The receiver has KV of the shared prefix, and no states of it."""
    folder = make(tmp_path, family)
    settings = {**SETTINGS, "max_num_batched_tokens": chunk}
    async with running_pair(folder, sides=Sides(transport=transport), **settings) as pair:
        info = pair.decode.info
        assert await answers_of(pair, PROMPTS) == expected(folder)
        found = await pair.decode.call("counters")
        await pair.until_free()
    num_cached = [0, 0, 6, 6, 0]
    assert found[f"transfer_bytes_total{{transport={transport}}}"] == moved_bytes(info, PROMPTS, num_cached)


async def test_the_next_turn_of_a_chat_continues_from_a_snapshot(tmp_path: Path) -> None:
    """The sender computes its new tokens, and 64 at most of those before; the receiver has the KV of the first turn."""
    folder = make(tmp_path, "qwen3_5_text")
    settings = {**SETTINGS, "block_size": 16, "max_model_len": 256, "state_snapshots": 4}
    prompt = [(7 * place + 3) % 250 for place in range(130)]
    (answer,) = expected(folder, [prompt])
    turn = [*prompt, *answer, 5, 6, 7]
    async with running_pair(folder, **settings) as pair:
        assert await answers_of(pair, [prompt, turn]) == [answer, *expected(folder, [turn])]
        counters = await pair.prefill.call("counters")
        received = await pair.decode.call("counters")
        info = pair.decode.info
        await pair.until_free()
    assert counters["cached_tokens_total"] == 128
    assert len(turn) - 128 <= 64 + len(answer) + 3
    assert info.states is not None
    num_bytes = (9 + 10 - 8) * info.layout.block_bytes + 2 * info.states.slot_bytes
    assert received["transfer_bytes_total{transport=tcp}"] == num_bytes


async def test_choices_and_preempted_answers_are_those_of_generate(model: Path) -> None:
    """Many at once, n = 3, through slots and pools that do not hold them all."""
    prompts = [*PROMPTS[1:], *([index, *SHARED] for index in range(4))]
    small = {**SETTINGS, "max_num_batched_tokens": 13, "max_model_len": 72, "kv_cache_bytes": 45_000}
    async with running_pair(model, sides=Sides(transport="shm"), **small) as pair:
        info = pair.decode.info
        answers = await choices_of(pair, prompts, 3)
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert 2 <= info.num_state_slots < 3 * len(prompts)
    assert answers == [[answer] * 3 for answer in expected(model, prompts)]
    assert counters["num_preemptions_total"] > 0


@pytest.mark.parametrize("family", ["lfm2", pytest.param("mamba2", marks=pytest.mark.slow)])
async def test_an_answer_goes_on_where_another_worker_stopped(tmp_path: Path, family: str) -> None:
    """Law 5: a replay with the delivered tokens at the prompt's end, at each position."""
    folder = make(tmp_path, family)
    async with running_pair(folder, **SETTINGS) as pair:
        await check_replays(pair, PROMPTS[2], expected(folder)[2], GREEDY)


@pytest.mark.parametrize("family", ["qwen3_5_text", pytest.param("mamba2", marks=pytest.mark.slow)])
async def test_an_answer_moves_between_workers(tmp_path: Path, family: str) -> None:
    """Each of three moves hands over the states behind all tokens but the newest, and no token changes."""
    folder = make(tmp_path, family)
    async with running_pair(folder, **SETTINGS) as pair:
        await check_moves(pair, SHARED, expected(folder, [SHARED], 60)[0])


@pytest.mark.parametrize("block", [5, 6])
async def test_no_answer_from_a_damaged_block(model: Path, block: int) -> None:
    """Law 3. Block 6 of the transfer is the slot."""
    damage = partial(CorruptingReceiver, block_index=block)
    async with running_pair(model, damage, **SETTINGS) as pair:
        _, rest = await pair.ask("damaged", SHARED, GREEDY)
        assert (tokens_of(rest), rest[-1].error_kind) == ([], ErrorKind.TRANSFER_FAILED)
        await pair.until_free()


@pytest.mark.parametrize("transport", ["tcp", pytest.param("shm", marks=pytest.mark.slow)])
async def test_a_damaged_piece_is_read_again(tmp_path: Path, transport: str) -> None:
    """A slot of several pieces, of which the second one arrives damaged once."""
    torch.set_num_threads(1)
    config, model_class = tiny_config("qwen3_5_text")
    for name, value in {"num_value_heads": 8, "key_head_dim": 128, "value_head_dim": 128}.items():
        setattr(config, f"linear_{name}", value)
    folder = write_checkpoint(tmp_path, model_class(config).eval(), 3)
    damage = partial(CorruptingReceiver, block_index=7, num_times=1)
    async with running_pair(folder, damage, Sides(transport=transport), **SETTINGS) as pair:
        states = pair.decode.info.states
        assert states is not None and states.num_pieces > 1
        _, rest = await pair.ask("damaged", SHARED, GREEDY)
        counters = await pair.decode.call("counters")
        assert counters["transfer_digest_mismatches_total"] == 1
        assert tokens_of(rest) == expected(folder, [SHARED])[0][1:]
        await pair.until_free()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("float32", "bfloat16"), pytest.param("bfloat16", "float32", marks=pytest.mark.slow)],
)
async def test_states_are_not_rounded_with_the_kv(model: Path, prefill: str, decode: str) -> None:
    """Another dtype of the KV: its blocks are converted, and the slot is read as it is."""
    sides = Sides({"kv_cache_dtype": prefill}, {"kv_cache_dtype": decode})
    async with running_pair(model, sides=sides, **SETTINGS) as pair:
        answers = await answers_of(pair, PROMPTS[:3])
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * 3
    assert [answer[0] for answer in answers] == [answer[0] for answer in expected(model, PROMPTS[:3])]
    assert counters["transfer_converted_blocks_total"] == 1 + 6 + (12 - 6)


async def test_blocks_of_other_sizes_cross_beside_states(model: Path) -> None:
    sides = Sides({"block_size": 8})
    async with running_pair(model, sides=sides, **SETTINGS) as pair:
        assert await answers_of(pair, PROMPTS) == expected(model)
        await pair.until_free()
