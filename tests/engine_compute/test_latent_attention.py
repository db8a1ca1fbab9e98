"""Multi-head latent attention over one cached row of each token: sizes, answers, refusals."""

import asyncio
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import linear

from contract.errors import InternalError, SettingError
from contract.layout import LATENT
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import InProcessClient
from engine.models.latent_attention import LatentProjection, find_latent
from engine.models.loading import load
from engine.models.served import examine
from engine.settings import EngineSettings
from tests.checkpoints import load_reference, make_foreign_checkpoint, reference_greedy, write_checkpoint
from tests.drafting_engines import DraftingEngine
from tests.engine_compute.driver import Driver
from tests.engine_pair import outputs_of, tokens_of

FAMILIES = ("deepseek_v3", "glm4_moe_lite", "mistral4")
ROW = 16 + 8
"""Numbers of a token's row in ``make_foreign_checkpoint``: the latent, and the rotated part of the key."""
NUM_LAYERS = 2
NUM_TOKENS = 16
SHARED = [(37 * i + 11) % 256 for i in range(24)]
PROMPTS = [[7], [3, 1, 4, 1, 5], SHARED, [*SHARED, *range(60, 81)], [*SHARED, *range(90, 107)]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
OTHERS: dict[str, dict[str, Any]] = {
    "AXK1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
    },
    "DeepseekV2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "LongcatFlash": {"n_routed_experts": 4, "moe_topk": 2, "expert_ffn_hidden_size": 32},
    "MiniCPM3": {},
    "Youtu": {},
}
"""Further models of transformers with such attention, and their own fields."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pool_and_the_check_count_one_row_a_token(tmp_path: Path, family: str) -> None:
    """D6, D10: (kv_lora_rank + rope) numbers of each token and layer, neither padded nor doubled."""
    folder = make_foreign_checkpoint(tmp_path, family, seed=3)
    assert examine(folder).kv_bytes_per_token == ROW * 4 * NUM_LAYERS
    assert examine(folder, kv_cache_dtype="bfloat16").kv_bytes_per_token == ROW * 2 * NUM_LAYERS
    driver = Driver(folder, kv_cache_bytes=10 * 4 * ROW * 4 * NUM_LAYERS)
    pool = driver.runner.memory.pool
    assert (driver.num_blocks, pool.nbytes) == (10, 10 * 4 * ROW * 4 * NUM_LAYERS)
    assert driver.runner.memory.layout.parts == LATENT
    assert pool.shape == (10, NUM_LAYERS, 1, 1, 4, ROW)
    driver.executor.shutdown()


@pytest.mark.parametrize("name", OTHERS)
def test_further_families_give_the_answers_of_generate(tmp_path: Path, name: str) -> None:
    """Prompts in chunks of 7 beside each other, and what ``check`` promises about their KV."""
    config: Any = getattr(transformers, f"{name}Config")
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
    common = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 16, "head_dim": 8}
    positions = {"max_position_embeddings": 256}
    model = getattr(transformers, f"{name}ForCausalLM")
    built = model(config(**common, **sizes, **heads, **positions, **OTHERS[name]))
    folder = write_checkpoint(tmp_path, built, 3)
    reference = load_reference(folder)
    answers = {str(prompt): reference_greedy(reference, prompt, NUM_TOKENS) for prompt in PROMPTS}
    served = examine(folder)
    driver = Driver(folder, dtype="float32")
    shape = driver.runner.memory.layout.shape
    assert (served.is_tried, served.kv_bytes_per_token) == (True, prod(shape) // 4 * 4)
    assert shape[1:] == (1, 1, 4, 32)
    for prompt in PROMPTS:
        driver.add(str(prompt), prompt)
    assert driver.generate(list(answers), NUM_TOKENS, chunk=7) == answers
    driver.executor.shutdown()


async def test_a_cramped_engine_with_choices_and_a_tier(tmp_path: Path) -> None:
    """Preempted requests, cached prefixes, blocks that a tier gives back, and two choices of a prompt."""
    folder = make_foreign_checkpoint(tmp_path, "deepseek_v3", seed=3)
    reference = load_reference(folder)
    answers = [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in PROMPTS]
    block_bytes = 4 * ROW * 4 * NUM_LAYERS
    client = await InProcessClient.start(
        EngineSettings(
            model=folder,
            dtype="float32",
            block_size=4,
            max_model_len=72,
            max_num_batched_tokens=13,
            kv_cache_bytes=26 * block_bytes,
            host_kv_bytes=64 * block_bytes,
        )
    )

    async def ask(name: str, prompt: list[int], **fields: Any) -> list[Any]:
        given = {"request_id": name, "prompt_token_ids": prompt, "sampling": GREEDY, **fields}
        return await outputs_of(client, EngineRequest(**given))

    try:
        for turn in range(3):
            asked = (ask(f"{turn}-{index}", prompt) for index, prompt in enumerate(PROMPTS))
            assert list(map(tokens_of, await asyncio.gather(*asked))) == answers
        outputs = await ask("both", PROMPTS[3], num_choices=2)
        of_choice = [tokens_of([each for each in outputs if each.choice == number]) for number in range(2)]
        assert of_choice == [answers[3]] * 2
        counters = await client.call("counters")
        assert counters["num_preemptions_total"] > 0
        assert counters["cached_tokens_total"] > 0
        assert counters["kv_tier_loaded_blocks_total{tier=host}"] > 0
    finally:
        await client.shutdown()


def test_drafted_tokens_are_those_of_generate(tmp_path: Path) -> None:
    """Long answers of the small model repeat themselves, so that drafts are kept; others are rejected."""
    folder = make_foreign_checkpoint(tmp_path, "deepseek_v3", seed=3)
    prompts = [[*([5, 6, 7, 8] * 5), last] for last in (1, 9)]
    sampling = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    engine = DraftingEngine(folder, dtype="float32", num_speculative_tokens=4)
    requests = [
        EngineRequest(request_id="", prompt_token_ids=prompt, sampling=sampling) for prompt in prompts
    ]
    answers = engine.answers(requests)
    reference = load_reference(folder)
    for index, prompt in enumerate(prompts):
        assert answers[str(index), 0]["token_ids"] == reference_greedy(reference, prompt, 150)
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    engine.core.shutdown()


def projection_of(*, bias: bool = False, **sizes: int) -> nn.Module:
    """Return what a layer has of a projection with 3 heads, whose key has 4 numbers and 2 rotated ones."""
    module = nn.Module()
    module.kv_b_proj = nn.Linear(8, 3 * (4 + 5), bias=bias)
    module.kv_a_layernorm = nn.Identity()
    for name, size in {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5, **sizes}.items():
        setattr(module, name, size)
    return module


def test_the_absorbed_form_is_the_plain_one() -> None:
    """Scores and means of values, against keys and values that are computed from each latent."""
    module = projection_of()
    latent = find_latent(module)
    assert latent is not None and find_latent(module) is not module.kv_b_proj
    generator = torch.Generator().manual_seed(3)
    latents, turned, query = (
        torch.randn(*shape, generator=generator, dtype=torch.float32)
        for shape in ((1, 6, 8), (6, 2), (6, 3, 6))
    )
    whole = linear(latents[0], module.kv_b_proj.weight).view(6, 3, 9)  # type: ignore[arg-type, union-attr]
    key = torch.cat((whole[..., :4], turned[:, None].expand(6, 3, 2)), dim=-1)
    assert not latent(latents).any()
    rows = latent.rows(key)
    assert (rows.shape, latent.row_size) == ((6, 1, 10), 10)
    weights = torch.einsum("qhd,khd->hqk", query, key)
    torch.testing.assert_close(torch.einsum("qhd,kd->hqk", latent.absorb(query), rows[:, 0]), weights)
    mixed = torch.einsum("hqk,kd->qhd", weights, rows[:, 0])
    torch.testing.assert_close(latent.expand(mixed), torch.einsum("hqk,khd->qhd", weights, whole[..., 4:]))


def test_latents_serve_one_attention() -> None:
    latent = find_latent(projection_of())
    assert latent is not None
    latent(torch.zeros(1, 6, 8))
    latent.rows(torch.zeros(6, 3, 6))
    with pytest.raises(InternalError, match="latents that it has not computed"):
        latent.rows(torch.zeros(6, 3, 6))


def test_only_a_projection_of_latents_alone_is_absorbed() -> None:
    without_norm = projection_of()
    del without_norm.kv_a_layernorm
    for module in (
        nn.Module(),
        without_norm,
        projection_of(bias=True),
        projection_of(v_head_dim=0),
        projection_of(v_head_dim=6),
    ):
        assert find_latent(module) is None
    assert isinstance(find_latent(projection_of()), LatentProjection)


def test_several_ranks_and_float16_are_refused_as_for_all_models_of_transformers(tmp_path: Path) -> None:
    folder = make_foreign_checkpoint(tmp_path, "deepseek_v3")
    with pytest.raises(SettingError, match="DeepseekV3ForCausalLM is computed by transformers, on one rank"):
        examine(folder, num_ranks=2)
    with pytest.raises(SettingError, match="kv_cache_dtype is 'float16', and the model computes float32"):
        examine(folder, kv_cache_dtype="float16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_self_check(tmp_path: Path, dtype: str) -> None:
    folder = make_foreign_checkpoint(tmp_path, "deepseek_v3", dtype=torch.bfloat16)
    assert load(folder, dtype, None, torch.device("cpu")).info.kv_dtype == dtype
