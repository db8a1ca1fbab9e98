"""Engines on a real model with recurrent layers, with memory for a few requests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.cache_layout import TYPICAL_TOKENS
from contract.errors import SettingError
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from contract.state_layout import StateLayout, StatePart
from engine.core import EngineCore
from engine.kv_cache.shares import HOST_LIMIT_BYTES, StateNeeds, Workload
from engine.kv_cache.startup import KVCacheSpec, make_config
from engine.settings import EngineSettings
from tests.checkpoints import load_reference, reference_greedy, write_checkpoint
from tests.drafting_engines import DraftingEngine, without_drafts
from tests.families.tiny_models import make_tiny, tiny_config

SHARED = [(37 * i + 11) % 256 for i in range(40)]
PROMPTS = [[7], SHARED[:9], [*SHARED, *range(60, 81)], SHARED, [5, 6, 7, 8] * 9]
NUM_TOKENS = 12
CRAMPED: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "max_num_batched_tokens": 13,
    "max_num_seqs": 4,
    "max_model_len": 80,
}
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), make_tiny("lfm2"), 3)


def requests(prompts: Sequence[list[int]]) -> list[EngineRequest]:
    """Greedy answers, of which some have three choices."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [
        EngineRequest(
            request_id="",
            prompt_token_ids=prompt,
            sampling=sampling,
            num_choices=1 + 2 * (index % 3 == 2),
        )
        for index, prompt in enumerate(prompts)
    ]


def check_answers(engine: DraftingEngine, folder: Path, prompts: Sequence[list[int]] = PROMPTS) -> None:
    """Compare the answers to all prompts at once with transformers' own."""
    reference = load_reference(folder)
    answers = engine.answers(requests(prompts))
    for (place, _), answer in answers.items():
        expected = reference_greedy(reference, prompts[int(place)], NUM_TOKENS)
        assert answer["token_ids"] == expected
    engine.core.call("check_integrity", [])


def bytes_for(core: EngineCore, num_texts: float) -> int:
    """Return the bytes of two slots and of the KV of some texts of any length."""
    assert core.executor.kv_cache_config is not None
    states = core.executor.kv_cache_config.cache.states
    assert states is not None
    return int(2 * states.slot_bytes + num_texts * 20 * core.info.layout.block_bytes)


def test_answers_of_whole_prompts_are_those_of_transformers(model: Path) -> None:
    """Prompts and answers never share a step; slots and KV run short."""
    changes = {**CRAMPED, "max_num_batched_tokens": 80, "scheduling_policy": "prefill-first"}
    roomy = without_drafts(model, kv_cache_bytes=4 * MIB, **changes)
    check_answers(roomy, model)
    cramped = without_drafts(model, kv_cache_bytes=bytes_for(roomy.core, 1.1), **changes)
    assert cramped.core.info.num_state_slots == 2
    check_answers(cramped, model)
    assert cramped.core.call("counters", [])["num_preemptions_total"] > 0


def test_answers_are_those_of_transformers(model: Path) -> None:
    """Chunks, choices and preemption: two slots for four places, and KV for little more than one text."""
    roomy = without_drafts(model, kv_cache_bytes=4 * MIB, **CRAMPED)
    assert roomy.core.info.num_state_slots == CRAMPED["max_num_seqs"]
    check_answers(roomy, model)
    num_bytes = bytes_for(roomy.core, 1.1)
    cramped = without_drafts(model, kv_cache_bytes=num_bytes, **CRAMPED)
    assert cramped.core.info.num_state_slots == 2
    for _ in range(2):
        check_answers(cramped, model)
    counters = cramped.core.call("counters", [])
    assert counters["num_preemptions_total"] > 0
    assert counters["cached_tokens_total"] == 0


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "jamba", "mamba2"])
def test_the_next_turn_of_a_chat_continues_from_a_snapshot(tmp_path: Path, family: str) -> None:
    """It computes its new tokens, and 64 at most of those before."""
    folder = write_checkpoint(tmp_path, make_tiny(family), 3)
    settings = {**CRAMPED, "max_model_len": 256, "max_num_batched_tokens": 50, "block_size": 16}
    engine = without_drafts(folder, kv_cache_bytes=4 * MIB, state_snapshots=4, **settings)
    first = [(7 * place + 3) % 250 for place in range(130)]
    answer = engine.answers(requests([first]))["0", 0]["token_ids"]
    second = [*first, *answer, 5, 6, 7]
    check_answers(engine, folder, [second])
    num_cached = engine.core.call("counters", [])["cached_tokens_total"]
    assert num_cached == 128
    assert len(second) - num_cached <= 64 + len(answer) + 3


def test_a_model_of_recurrent_layers_alone_is_served(tmp_path: Path) -> None:
    """Its blocks have no bytes, and count the tokens of texts; slots decide how many requests run."""
    folder = write_checkpoint(tmp_path, make_tiny("mamba2"), 3)
    settings = {**CRAMPED, "max_num_seqs": 2}
    engine = without_drafts(folder, kv_cache_bytes=MIB, **settings)
    info = engine.core.info
    assert (info.layout.num_layers, info.layout.block_bytes, info.num_state_slots) == (0, 0, 2)
    assert info.num_blocks == 1 + 2 * 20
    check_answers(engine, folder)


def test_a_tier_needs_room_for_states(model: Path) -> None:
    """It divides its bytes as the pool does."""
    settings = EngineSettings(model=model, kv_cache_bytes=MIB, host_kv_bytes=1 << 16, **CRAMPED)
    with pytest.raises(SettingError, match="are for blocks of states, and one block has"):
        EngineCore(settings)


def test_snapshots_have_slots_of_their_own(model: Path) -> None:
    engine = without_drafts(model, kv_cache_bytes=4 * MIB, state_snapshots=3, **CRAMPED)
    assert engine.core.info.num_state_slots == CRAMPED["max_num_seqs"] + 3
    snapshots = engine.scheduler.pools.snapshots
    assert snapshots is not None
    assert sorted(snapshots.slots()) == [5, 6, 7]
    alone = without_drafts(
        model, kv_cache_bytes=4 * MIB, state_snapshots=3, enable_prefix_caching=False, **CRAMPED
    )
    assert alone.core.info.num_state_slots == CRAMPED["max_num_seqs"]
    check_answers(alone, model)


def test_too_little_memory_names_all_numbers(model: Path) -> None:
    settings = EngineSettings(model=model, kv_cache_bytes=1000, **CRAMPED)
    with pytest.raises(
        SettingError, match=r"there are 1000 bytes .* 2 requests, 0 snapshots and 0 drafts need 2 slots of"
    ):
        EngineCore(settings)


@pytest.mark.parametrize(
    ("num_bytes", "slot_bytes", "most", "num_slots"),
    [
        (1 << 30, 64 * MIB, 256, 9),
        (1 << 30, MIB, 256, 20),
        (1 << 30, MIB, 4, 4),
        (140 * MIB, 64 * MIB, 256, 2),
    ],
)
def test_as_many_requests_as_fit_get_a_slot(
    num_bytes: int, slot_bytes: int, most: int, num_slots: int
) -> None:
    """Each with three quarters of a text of 4,096 tokens, 48 MiB here; the rest of the memory is KV."""
    states = StateLayout((StatePart(layer=1, name="recurrent", shape=(slot_bytes // 4,), dtype="float32"),))
    specs = {str(layer): KVCacheSpec(16, 4, 256, "bfloat16") for layer in range(4)}
    workload = Workload(32768, 2048, most)
    config = make_config(specs, num_bytes, workload, StateNeeds(states, 16))
    assert config.num_state_slots == num_slots
    rest = num_bytes - config.num_bytes
    assert 0 <= rest < 2 * sum(spec.block_bytes for spec in specs.values())


@pytest.mark.parametrize(
    ("num_recurrent", "num_heads", "num_channels", "num_attending", "num_slots"),
    [
        pytest.param(30, 32, 8192, 10, 8, id="Qwen3.6-35B-A3B: 65 MB of states, 20 KiB of KV a token"),
        pytest.param(18, 16, 6144, 6, 18, id="Qwen3.5-0.8B: 20 MB of states, 12 KiB of KV a token"),
    ],
)
def test_the_default_memory_has_room_for_eight_requests_of_a_hybrid(
    num_recurrent: int, num_heads: int, num_channels: int, num_attending: int, num_slots: int
) -> None:
    parts = []
    for layer in range(num_recurrent):
        parts.append(StatePart(layer=layer, name="conv", shape=(num_channels, 4), dtype="bfloat16"))
        parts.append(StatePart(layer=layer, name="recurrent", shape=(num_heads, 128, 128), dtype="float32"))
    specs = {str(layer): KVCacheSpec(16, 2, 256, "bfloat16") for layer in range(num_attending)}
    needs = StateNeeds(StateLayout(tuple(parts)), 16)
    config = make_config(specs, HOST_LIMIT_BYTES, Workload(262_144, 2048, 256), needs)
    assert config.num_state_slots == num_slots >= 8
    # What the slots leave are three quarters of a typical text of each.
    assert config.num_blocks[0] * 16 >= num_slots * TYPICAL_TOKENS * 3 // 4


@pytest.mark.slow
def test_eight_requests_of_a_hybrid_run_at_once_in_the_default_memory(tmp_path: Path) -> None:
    """Its states have 64 MiB, its KV 20 KiB a token."""
    shape = {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_key_head_dim": 512,
        "linear_value_head_dim": 512,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
        "head_dim": 256,
        "max_position_embeddings": 4096,
    }
    config, model_class = tiny_config("qwen3_5_text")
    torch.manual_seed(3)
    folder = write_checkpoint(tmp_path, model_class(type(config)(**{**config.to_dict(), **shape})), 3)
    engine = without_drafts(folder, kv_cache_bytes=HOST_LIMIT_BYTES, dtype="float32")
    memory = engine.core.executor.kv_cache_config
    assert memory is not None and memory.cache.states is not None
    assert memory.cache.states.slot_bytes >= 64 * MIB
    assert memory.cache.token_bytes == 20 << 10
    num_running = set()
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    for index in range(8):
        prompt = [index + 1] * 5
        engine.core.add_request(
            EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling)
        )
    while engine.scheduler.has_unfinished_requests():
        num_running.add(engine.scheduler.get_request_counts())
        engine.core.step()
    assert num_running == {(0, 8), (8, 0)}
