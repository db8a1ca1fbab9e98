"""KV in another dtype than the computation: sizes, answers of a plain reference that rounds it, and the refusals."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from contract.errors import SettingError
from contract.layout import KVLayout, weights_of
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.attention.backend import create_backend
from engine.client import InProcessClient
from engine.compute.forward_plain import PlainForward
from engine.kv_cache.memory import allocate
from engine.models.loading import load
from engine.models.served import examine
from engine.settings import EngineSettings
from tests.attention_cases import Case
from tests.checkpoints import FAMILIES, load_reference, make_checkpoint, make_foreign_checkpoint
from tests.engine_compute.driver import Driver
from tests.engine_pair import outputs_of, tokens_of

CPU = torch.device("cpu")
NUM_TOKENS = 20
LONG = [(37 * i + 11) % 256 for i in range(61)]
PROMPTS = {"one": [7], "short": [3, 1, 4, 1, 5], "block": list(range(40, 48)), "long": LONG}


def rounded(states: Tensor) -> Tensor:
    return states.bfloat16().float()


class RoundedCache(transformers.DynamicCache):
    """The cache of transformers, which returns keys and values as a pool in bfloat16 has them."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **fields: Any
    ) -> tuple[Tensor, Tensor]:
        states = rounded(key_states), rounded(value_states)
        kept: tuple[Tensor, Tensor] = super().update(*states, layer_idx, *args, **fields)
        return kept


def rounded_greedy(model: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the greedy answers of transformers' model, over KV that is rounded."""
    answers = []
    for prompt in prompts:
        cache = RoundedCache(config=model.config)
        answer, fresh = list[int](), prompt
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                logits = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True).logits
            fresh = [int(logits[0, -1].argmax())]
            answer += fresh
        answers.append(answer)
    return answers


def answers_of(driver: Driver, chunk: int = 10_000) -> list[list[int]]:
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
    generated = driver.generate(list(PROMPTS), NUM_TOKENS, chunk)
    driver.executor.shutdown()
    return [generated[name] for name in PROMPTS]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "cohere2", "deepseek_v3"])
def test_answers_are_those_of_a_reference_that_rounds_kv(tmp_path: Path, family: str) -> None:
    """D12: full attention, sliding windows and latents, our own decoder and transformers', whole prompts and chunks."""
    windows: dict[str, Any] = {"sliding_window": 6} if family == "mistral" else {}
    make = make_checkpoint if family in FAMILIES else make_foreign_checkpoint
    folder = make(tmp_path, family, 3, **windows)
    expected = rounded_greedy(load_reference(folder), list(PROMPTS.values()))
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)
    for chunk in (10_000, 7):
        driver = Driver(folder, dtype="float32", kv_cache_dtype="bfloat16")
        assert driver.runner.memory.pool.dtype == torch.bfloat16
        assert answers_of(driver, chunk) == expected


def test_logits_differ_from_those_of_whole_kv_by_its_rounding(tmp_path: Path) -> None:
    """D12: they are near those of the reference that rounds, and not of the one that does not."""
    folder = make_checkpoint(tmp_path, seed=3)
    loaded = load(folder, "float32", None, CPU, kv_cache_dtype="bfloat16")
    case = Case(block_size=4, work=((0, 60),))
    inputs = case.inputs()
    config = loaded.config
    layout = KVLayout(
        num_layers=config.num_layers, num_kv_heads=2, head_dim=16, block_size=4, dtype=loaded.info.kv_dtype
    )
    memory = allocate(layout, case.num_blocks, CPU)
    forward = PlainForward(loaded.model, create_backend("torch"), 4, CPU)
    model = load_reference(folder)
    tokens = torch.from_numpy(inputs.input_ids)[None].long()
    with torch.inference_mode():
        logits = forward.logits(forward.forward(inputs, memory.layers))
        whole = model(tokens).logits[0]
        expected = model(tokens, past_key_values=RoundedCache(config=model.config), use_cache=True).logits[0]
    rounding = float((expected - whole).abs().max())
    assert 0 < rounding < 0.1 * float(whole.abs().max())
    # On another CPU sums end in other bits, so a few values are rounded to their other neighbour.
    assert float((logits - expected).abs().max()) < rounding / 5
    memory.close()


@pytest.mark.parametrize(
    "case", [Case(), Case(window=20), Case(softcap=5.0), Case(dtype=torch.bfloat16)], ids=str
)
def test_attention_sees_what_is_stored(case: Case) -> None:
    """Bit by bit: as over a pool in the model's dtype that holds the same values, on chunks and decodes."""
    other = torch.bfloat16 if case.dtype == torch.float32 else torch.float32
    inputs = case.inputs()
    step = create_backend("torch").plan(inputs, case.block_size, CPU)
    query, key, value = case.states(inputs)
    pool = case.pool(inputs).to(other)
    step.store(key, value, pool[:, 1])
    output = step.attend(case.shape, query, key, value, pool[:, 1])
    same = case.pool(inputs).to(other).to(case.dtype)
    key, value = (states.to(other).to(case.dtype) for states in (key, value))
    step.store(key, value, same[:, 1])
    assert torch.equal(output, step.attend(case.shape, query, key, value, same[:, 1]))
    assert output.dtype == case.dtype
    assert torch.equal(pool.to(case.dtype).nan_to_num(), same.nan_to_num())


def test_the_same_memory_holds_twice_the_blocks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """D12: the pool is sized, allocated and reported in the dtype of the KV."""
    folder = make_checkpoint(tmp_path)
    caplog.set_level("INFO")
    whole, half = (Driver(folder, dtype="float32", kv_cache_dtype=dtype) for dtype in ("auto", "bfloat16"))
    layouts = [driver.runner.memory.layout for driver in (whole, half)]
    assert [layout.dtype for layout in layouts] == ["float32", "bfloat16"]
    assert layouts[0].block_bytes == 2 * layouts[1].block_bytes
    assert half.num_blocks == 2 * whole.num_blocks
    assert f"KV cache: {whole.num_blocks} blocks of 4 tokens in float32, {2**21} bytes" in caplog.text
    assert f"KV cache: {half.num_blocks} blocks of 4 tokens in bfloat16, {2**21} bytes" in caplog.text
    assert half.runner.memory.pool.nbytes == whole.runner.memory.pool.nbytes
    infos = [driver.runner.model_info for driver in (whole, half)]
    assert [(info.dtype, info.kv_dtype) for info in infos] == [
        ("float32", "float32"),
        ("float32", "bfloat16"),
    ]
    for driver in (whole, half):
        driver.executor.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_of_the_model_by_its_name_is_auto(
    tmp_path: Path, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """D12: the same tokens by the same implementation, under the same fingerprint."""
    folder = make_checkpoint(tmp_path, seed=3, hidden_size=64, head_dim=32)
    caplog.set_level("INFO")
    found = []
    for setting in ("auto", dtype):
        caplog.clear()
        driver = Driver(folder, dtype=dtype, kv_cache_dtype=setting)
        chosen = [text for text in caplog.messages if "kernels" in text or "torch" in text]
        info, layout = driver.runner.model_info, driver.runner.memory.layout
        found.append((answers_of(driver, 7), info, layout, chosen))
    assert found[0] == found[1]


def test_kv_of_the_other_dtype_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    """D12, law 7: it is computed from rounded KV, so it is never found in place of the other; the weights are the same."""
    folder = make_checkpoint(tmp_path)
    pairs = [("float32", "auto"), ("float32", "bfloat16"), ("bfloat16", "auto"), ("bfloat16", "float32")]
    infos = [load(folder, dtype, None, CPU, kv_cache_dtype=setting).info for dtype, setting in pairs]
    assert len({info.fingerprint for info in infos}) == 4
    assert len({weights_of(info.fingerprint) for info in infos}) == 1
    assert load(folder, "float32", None, CPU, kv_cache_dtype="float32").info == infos[0]


def test_the_kernels_leave_other_kv_to_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log gives the reason. A value of bfloat16 goes through float32 unchanged, so the answers are those of torch."""
    folder = make_checkpoint(tmp_path, seed=3, dtype=torch.bfloat16, hidden_size=64, head_dim=32)
    caplog.set_level("INFO")
    widened = Driver(folder, kv_cache_dtype="float32")
    assert (
        "plain torch computes the model, not the kernels: they read KV in bfloat16, and kv_cache_dtype is float32"
        in caplog.text
    )
    assert answers_of(widened) == answers_of(Driver(folder, attention_backend="torch"))


async def test_a_cramped_engine_answers_like_the_reference(tmp_path: Path) -> None:
    """D12: with preempted requests, cached prefixes and blocks that a tier gives back."""
    folder = make_checkpoint(tmp_path, seed=3)
    prompts = [*PROMPTS.values(), [*LONG[:24], 9, 9], [*LONG[:40], 1, 2, 3]]
    expected = rounded_greedy(load_reference(folder), prompts)
    block_bytes = (
        2 * 2 * 2 * 16 * 4 * 2
    )  # 4 tokens of 2 layers with 2 heads of 16 numbers of 2 bytes, K and V
    client = await InProcessClient.start(
        EngineSettings(
            model=folder,
            dtype="float32",
            kv_cache_dtype="bfloat16",
            block_size=4,
            max_num_batched_tokens=13,
            max_model_len=88,
            kv_cache_bytes=26 * block_bytes,
            host_kv_bytes=64 * block_bytes,
        )
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

    async def ask(request_id: str, prompt: list[int]) -> list[int]:
        request = EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)
        return tokens_of(await outputs_of(client, request))

    try:
        assert client.info.num_blocks == 26
        for turn in range(2):
            asked = (ask(f"{turn}-{index}", prompt) for index, prompt in enumerate(prompts))
            assert await asyncio.gather(*asked) == expected
        counters = await client.call("counters")
        assert counters["num_preemptions_total"] > 0
        assert counters["cached_tokens_total"] > 0
        assert counters["kv_tier_loaded_blocks_total{tier=host}"] > 0
    finally:
        await client.shutdown()


@pytest.mark.parametrize(
    ("family", "dtype", "setting"),
    [
        ("llama", "float32", "float16"),
        ("llama", "float16", "bfloat16"),
        ("llama", "bfloat16", "float16"),
        ("olmo2", "float32", "float16"),
    ],
)
def test_kv_that_cannot_hold_the_values_is_refused(
    tmp_path: Path, family: str, dtype: str, setting: str
) -> None:
    """Before weights are read: the check before a start, and the loader, by one sentence."""
    refusal = (
        f"kv_cache_dtype is '{setting}', and the model computes {dtype}: only float32 and bfloat16 are converted into each"
        f" other; set it to auto or {dtype}"
    )
    folder = (make_checkpoint if family in FAMILIES else make_foreign_checkpoint)(tmp_path, family)
    with pytest.raises(SettingError) as promised:
        examine(folder, dtype, kv_cache_dtype=setting)
    with pytest.raises(SettingError) as raised:
        load(folder, dtype, None, CPU, kv_cache_dtype=setting)
    assert promised.value.message == raised.value.message == refusal
    assert raised.value.param == "kv_cache_dtype"


def test_other_values_are_refused_with_the_right_ones() -> None:
    with pytest.raises(
        SettingError, match=r"kv_cache_dtype is 'fp8'.*allowed: auto, float32, bfloat16, float16"
    ):
        EngineSettings(model=Path(), kv_cache_dtype="fp8")  # type: ignore[arg-type]


def test_a_check_of_the_model_tells_the_bytes_of_a_token(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    whole = examine(folder, "float32")
    half = examine(folder, "float32", kv_cache_dtype="bfloat16")
    assert (whole.kv_bytes_per_token, whole.kv_dtype) == (2 * 2 * 2 * 16 * 4, "float32")
    assert (half.kv_bytes_per_token, half.kv_dtype, half.dtype) == (2 * 2 * 2 * 16 * 2, "bfloat16", "float32")
    assert half.num_weight_bytes == whole.num_weight_bytes
