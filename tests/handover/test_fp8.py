"""Hand-overs of models with FP8 weights, between workers that multiply them as FP8 and workers that convert them."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.engine_pair import Sides, running_pair
from tests.fp8_checkpoints import make_fp8, quantization
from tests.handover.plain_connector import Shelf
from tests.handover.test_unequal import CHUNK, Settings, answers_of

ON: Settings = {"fp8_products": "on", "dtype": "float32"}
OFF: Settings = {"fp8_products": "off", "dtype": "float32"}
CASES = [
    pytest.param(ON, OFF, id="a GPU to a CPU"),
    pytest.param(OFF, ON, id="a CPU to a GPU", marks=pytest.mark.slow),
    pytest.param(ON, ON, id="both as FP8", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    return make_fp8(make_checkpoint(folder / "source", "llama", seed=3), folder / "fp8", quantization())


@pytest.mark.parametrize(("prefill", "decode"), CASES)
async def test_tokens_are_those_of_the_kv_that_was_handed_over(
    model: Path, prefill: Settings, decode: Settings
) -> None:
    """Prompts that share prefixes, too: what one side computed is not found in place of what the other computes."""
    joined = partial(running_pair, model, max_num_batched_tokens=CHUNK)
    async with joined(sides=Sides(prefill, decode, connect=Shelf().connect)) as reference:
        expected = await answers_of(reference)
    async with joined(sides=Sides(prefill, decode)) as pair:
        assert await answers_of(pair) == expected
