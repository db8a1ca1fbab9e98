"""Layers whose KV differs in shape, layers that read the KV of others, and values that are narrower than their keys."""

from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import SettingError
from contract.layout import JOINED, KEY_VALUE
from engine.client import InProcessClient
from engine.models.loading import load
from engine.models.served import examine
from engine.settings import EngineSettings
from tests.checkpoints import reference_greedy, write_checkpoint
from tests.engine_compute.driver import greedy
from tests.engine_compute.test_cache_groups import CHUNK, NUM_TOKENS, PROMPTS, GroupedDriver
from tests.engine_pair import Sides, running_pair, tokens_of
from tests.families.tiny_models import make_tiny

# Layers, window, parts, KV heads and numbers of a part, of each group. The last two layers of a Gemma read those of the
# first two. MiMo's values have half of the width of its keys, and its windows twice the heads.
GROUPS: dict[str, list[tuple[Any, ...]]] = {
    "gemma3n_text": [((1,), None, KEY_VALUE, 2, 16), ((0,), 6, KEY_VALUE, 2, 16)],
    "gemma4_text": [((1,), None, KEY_VALUE, 2, 32), ((0,), 6, KEY_VALUE, 2, 16)],
    "mimo_v2_flash": [((0,), None, JOINED, 2, 16 + 8), ((1, 2, 3), 6, JOINED, 4, 16 + 8)],
}
BYTES = {"gemma3n_text": 4 * 2 * 2 * (16 + 16), "gemma4_text": 4 * 2 * 2 * (32 + 16), "mimo_v2_flash": None}
"""A token's bytes in float32, if the configuration gives the shape of each layer."""
SPECIAL = {
    "gemma3n_text": None,
    "gemma4_text": "layers whose KV differs in shape",
    "mimo_v2_flash": "attention sinks",
}
"""The reason why plain torch alone computes a model."""


@pytest.mark.parametrize("family", GROUPS)
def test_each_layer_has_the_bytes_of_its_own_shape(tmp_path: Path, family: str) -> None:
    """Tokens are those of generate, in chunks beside decodes, while blocks that are not held are full of nan."""
    model = make_tiny(family)
    write_checkpoint(tmp_path, model, 3)
    assert examine(tmp_path).kv_bytes_per_token == BYTES[family]
    assert load(tmp_path, "float32", None, torch.device("cpu")).model.special_attention == SPECIAL[family]
    driver = GroupedDriver(tmp_path, dtype="float32")
    found = []
    for group, region in zip(driver.regions.config.cache.groups, driver.regions.regions, strict=True):
        layout = group.layout
        found.append((group.layers, group.window, layout.parts, layout.num_kv_heads, layout.head_dim))
        numbers = len(group.layers) * len(layout.parts) * layout.num_kv_heads * layout.head_dim
        assert region.pool.nbytes == region.num_blocks * layout.block_size * numbers * 4
    assert found == GROUPS[family]
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, greedy())
    answers = driver.generate(list(PROMPTS), NUM_TOKENS, chunk=CHUNK)
    driver.executor.shutdown()
    assert answers == {name: reference_greedy(model, own, NUM_TOKENS) for name, own in PROMPTS.items()}


async def test_kv_of_different_shapes_needs_windows(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_tiny("gemma4_text"), 3)
    settings = EngineSettings(model=tmp_path, kv_cache_bytes=1 << 20, keeps_all_tokens=True)
    with pytest.raises(SettingError, match="have KV of different shapes: without windows they cannot share"):
        await InProcessClient.start(settings)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("family", ["gemma4_text", "mimo_v2_flash"])
async def test_each_group_is_handed_over_with_its_own_bytes(
    tmp_path: Path, family: str, transport: str
) -> None:
    """All blocks of layers that see all tokens, and of the others those that the next token sees."""
    model = make_tiny(family)
    write_checkpoint(tmp_path, model, 3)
    prompt = PROMPTS["c"]
    sampling = greedy(max_tokens=NUM_TOKENS, ignore_eos=True)
    async with running_pair(tmp_path, sides=Sides(transport=transport), block_size=4) as pair:
        legs = await pair.ask("shaped", prompt, sampling)
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert tokens_of(*legs) == reference_greedy(model, prompt, NUM_TOKENS)
    num_blocks = [12, 2]  # 45 tokens; the next one sees the positions from 40 on
    num_bytes = 0
    for count, (layers, _, parts, num_heads, head_dim) in zip(num_blocks, GROUPS[family], strict=True):
        num_bytes += count * 4 * len(layers) * len(parts) * num_heads * head_dim * 4
    assert counters[f"transfer_bytes_total{{transport={transport}}}"] == num_bytes
