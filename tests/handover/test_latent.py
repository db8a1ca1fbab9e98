"""Hand-overs of a model with multi-head latent attention: one row of each token crosses, and the tokens stay equal."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import ErrorKind
from tests.checkpoints import load_reference, make_foreign_checkpoint, reference_greedy
from tests.engine_pair import Sides, running_pair, tokens_of
from tests.handover.handing_off import (
    GREEDY,
    SHARED,
    answers_of,
    check_moves,
    check_replays,
    choices_of,
    expected,
)
from tests.handover.plain_connector import Shelf
from tests.kv_transfer.fakes import CorruptingReceiver

FAMILIES = ("deepseek_v3", "glm4_moe_lite", "mistral4")
ROW_BYTES = (16 + 8) * 4 * 2
"""A token has the latent and the rotated part of the key in two layers, in float32."""
BLOCK_SIZE = 8
PROMPTS = [[7], SHARED, [*SHARED, *range(60, 76)], [*SHARED, *range(90, 121)], list(range(100, 132))]
HALF_KV: dict[str, Any] = {"kv_cache_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_foreign_checkpoint(tmp_path_factory.mktemp("checkpoint"), "deepseek_v3", seed=3)


@pytest.mark.parametrize("transport", ["shm", "tcp", "nixl"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_one_row_a_token_crosses(tmp_path: Path, family: str, transport: str) -> None:
    """D6: the bytes are those of the rows, of whole blocks; prompts in chunks, and the tokens are those of generate."""
    folder = make_foreign_checkpoint(tmp_path, family, seed=3)
    answers = expected(folder, PROMPTS)
    settings: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 16}
    async with running_pair(folder, sides=Sides(transport=transport), **settings) as pair:
        assert await answers_of(pair, PROMPTS) == answers
        counters = await pair.decode.call("counters")
        await pair.until_free()
    blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in PROMPTS)
    # The shared tokens are in the receiver's prefix cache from their second prompt on.
    blocks -= 2 * (len(SHARED) // BLOCK_SIZE)
    assert counters[f"transfer_blocks_total{{transport={transport}}}"] == blocks
    assert counters[f"transfer_bytes_total{{transport={transport}}}"] == blocks * BLOCK_SIZE * ROW_BYTES


@pytest.mark.parametrize("sizes", [(8, 16), (16, 4)], ids=str)
async def test_another_block_size_changes_no_token(model: Path, sizes: tuple[int, int]) -> None:
    """Many at once, through pools that do not hold them all."""
    prefill, decode = ({"block_size": size} for size in sizes)
    small: dict[str, Any] = {"kv_cache_bytes": 160 * ROW_BYTES, "max_num_seqs": 4}
    async with running_pair(model, sides=Sides(prefill, decode), max_model_len=128, **small) as pair:
        answers = [answer for (answer,) in await choices_of(pair, PROMPTS, 1)]
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert answers == expected(model, PROMPTS)
    assert counters["transfer_converted_blocks_total"] > 0


@pytest.mark.parametrize(("prefill", "decode"), [({}, HALF_KV), (HALF_KV, {})], ids=["rounded", "widened"])
async def test_rows_are_rounded_once(model: Path, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    """D12: the tokens are those of a connector without blocks and plans."""
    sides = partial(Sides, {"block_size": 16, **prefill}, {"block_size": 8, **decode})
    async with running_pair(model, sides=sides(connect=Shelf().connect)) as reference:
        answers = await answers_of(reference, PROMPTS)
    async with running_pair(model, sides=sides("tcp")) as pair:
        assert await answers_of(pair, PROMPTS) == answers
        counters = await pair.decode.call("counters")
    assert counters["transfer_converted_blocks_total"] == counters["transfer_needed_blocks_total"]


@pytest.mark.parametrize("block", range(3))
async def test_no_answer_from_a_damaged_row(model: Path, block: int) -> None:
    """Law 3: a bit in the middle of a block, where the second layer's rows begin, is noticed."""
    damage = partial(CorruptingReceiver, block_index=block)
    async with running_pair(model, damage, block_size=BLOCK_SIZE) as pair:
        _, rest = await pair.ask("damaged", SHARED, GREEDY)
        assert (tokens_of(rest), rest[-1].error_kind) == ([], ErrorKind.TRANSFER_FAILED)
        await pair.until_free()


async def test_an_answer_goes_on_where_another_worker_stopped(model: Path) -> None:
    """Law 5: a replay with the delivered tokens at the prompt's end, at each position."""
    async with running_pair(model, block_size=BLOCK_SIZE) as pair:
        await check_replays(pair, PROMPTS[2], expected(model, PROMPTS)[2], GREEDY)


async def test_an_answer_moves_between_workers(model: Path) -> None:
    """Each of three moves hands over the rows of the answer so far, and no token changes."""
    async with running_pair(model, block_size=BLOCK_SIZE) as pair:
        await check_moves(pair, SHARED, reference_greedy(load_reference(model), SHARED, 60))
