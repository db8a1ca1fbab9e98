"""Each format of quantised weights gives the model of its twin: the same values, stored in float32."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from contract.errors import ErrorKind, SettingError
from contract.sampling import SamplingParams
from engine.distributed.group import SingleRank
from engine.models.checkpoint import Checkpoint
from engine.models.config import Head
from engine.models.loading import load, load_weights
from engine.models.registry import find_architecture
from engine.models.served import examine
from engine.models.sharding import Part, Piece
from engine.quantisation.scheme import Scheme
from engine.quantisation.stored import QuantisedCheckpoint, read_scheme
from tests.checkpoints import (
    load_reference,
    make_checkpoint,
    make_foreign_checkpoint,
    reference_greedy,
    write_checkpoint,
)
from tests.engine_compute.driver import Driver
from tests.engine_compute.test_equals_transformers import PROMPTS
from tests.engine_pair import Sides, running_pair
from tests.engine_parallel.driver import RanksDriver
from tests.fakes.engine.local_ranks import Exchange, LocalRankGroup
from tests.families.tiny_models import make_tiny
from tests.fp8_checkpoints import make_fp8, make_twin, quantization
from tests.quantised_checkpoints import VARIANTS, Variant, quantise
from tests.weight_packers import BLOCK, fp8_blocks, mxfp4

CPU = torch.device("cpu")
NUM_TOKENS = 8
CHOSEN = ("int4 in groups with zeros", "FP8 blocks", "GPTQ", "AWQ", "NF4 with nested scales", "LLM.int8")
"""A format of each library, whose answers are compared too."""


def made(folder: Path, name: str, **overrides: Any) -> tuple[Path, Path]:
    """Write a variant and its twin."""
    variant = VARIANTS[name]
    source = make_checkpoint(folder / "source", variant.family, seed=3, **overrides)
    return quantise(source, folder / "quantised", variant)


def parameters(folder: Path, dtype: str = "float32", **settings: Any) -> dict[str, Tensor]:
    return dict(load(folder, dtype, None, CPU, **settings).model.named_parameters())


def answers(folder: Path, make: Any = Driver) -> dict[str, list[int]]:
    driver = make(folder, dtype="float32")
    try:
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt)
        found: dict[str, list[int]] = driver.generate(list(PROMPTS), NUM_TOKENS, 7)
        return found
    finally:
        driver.executor.shutdown()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("name", VARIANTS)
def test_the_weights_are_those_of_the_twin(tmp_path: Path, name: str) -> None:
    """In float32 bit by bit; in bfloat16 each value is rounded once."""
    quantised, twin = made(tmp_path, name)
    assert_equal(parameters(quantised), parameters(twin))
    assert_equal(parameters(quantised, "bfloat16"), parameters(twin, "bfloat16"))
    served = examine(quantised, "bfloat16")
    assert served.num_weight_bytes == examine(twin, "bfloat16").num_weight_bytes
    assert str(served.quantisation).endswith(", dequantised to bfloat16 at load")


@pytest.mark.parametrize("name", CHOSEN)
def test_the_answers_are_those_of_the_twin(tmp_path: Path, name: str) -> None:
    quantised, twin = made(tmp_path, name)
    reference = load_reference(twin)
    expected = {name: reference_greedy(reference, prompt, NUM_TOKENS) for name, prompt in PROMPTS.items()}
    assert answers(quantised) == expected
    assert len({tuple(answer) for answer in expected.values()}) == len(PROMPTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_any_range_of_rows_and_columns_is_that_of_the_whole(tmp_path: Path, name: str) -> None:
    """Ranks read parts, and all is computed some rows at a time: words, blocks and groups are cut at any place."""
    quantised, _ = made(tmp_path, name)
    raw = json.loads((quantised / "config.json").read_text())
    scheme = read_scheme(raw)
    assert isinstance(scheme, Scheme)
    whole = QuantisedCheckpoint(Checkpoint(quantised), scheme)
    pieces = QuantisedCheckpoint(Checkpoint(quantised), scheme, chunk_numbers=64 * 5)
    for layer in ("self_attn.k_proj", "mlp.down_proj"):
        weight = f"model.layers.1.{layer}.weight"
        expected = whole.tensor(weight)
        assert torch.equal(pieces.tensor(weight), expected)
        rows = Part(0, len(expected), 20, (Piece(0, 3, 9), Piece(12, 17, 8)))
        by_rows = torch.cat([expected[3:12], torch.zeros(3, expected.shape[1]), expected[17:25]])
        assert torch.equal(pieces.part(weight, rows), by_rows)
        columns = Part(1, expected.shape[1], 24, (Piece(0, 13, 24),))
        assert torch.equal(pieces.part(weight, columns), expected[:, 13:37])


@pytest.mark.parametrize("name", ["int4 in ordered groups", "FP8 blocks"])
def test_two_ranks_give_the_answers_of_one(tmp_path: Path, name: str) -> None:
    quantised, _ = made(tmp_path, name)
    assert answers(quantised, partial(RanksDriver, tensor_parallel_size=2)) == answers(quantised)
    group = LocalRankGroup(1, Exchange(2))
    part = parameters(quantised, group=group)["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(part, parameters(quantised)["model.layers.0.mlp.down_proj.weight"][:, 48:])


@pytest.mark.parametrize(
    ("family", "name", "only"),
    [
        ("olmo2", "GPTQ", "proj.weight"),
        # Latents of weights in the form in which DeepSeek-V3 is published.
        ("deepseek_v3", "FP8 blocks", ("proj.weight", "kv_a_proj_with_mqa.weight")),
        pytest.param("phi3", "int4 in groups with zeros", "proj.weight", marks=pytest.mark.slow),
        pytest.param(
            "mixtral",
            "FP8 blocks",
            ("w1.weight", "w2.weight", "w3.weight", "q_proj.weight"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_models_of_transformers_read_dequantised_weights(
    tmp_path: Path, family: str, name: str, only: str | tuple[str, ...]
) -> None:
    """Also experts that transformers stacks, and joined layers."""
    source = make_foreign_checkpoint(tmp_path / "source", family, seed=3)
    quantised, twin = quantise(source, tmp_path / "quantised", VARIANTS[name], only=only)
    assert_equal(parameters(quantised), parameters(twin))
    assert answers(quantised) == answers(twin)
    served = examine(quantised)
    assert (served.is_own, served.num_weight_bytes) == (False, examine(twin).num_weight_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["the whole", "text_config"])
def test_the_text_of_composites_is_dequantised(tmp_path: Path, place: str) -> None:
    """Parts for images are not quantised, and config.json describes the form at one of two places."""
    source = write_checkpoint(tmp_path / "source", make_tiny("qwen3_vl"), 3)
    stored = load_file(source / "model.safetensors")
    only = tuple(name for name in stored if "language_model" in name and name.endswith("proj.weight"))
    quantised, twin = quantise(source, tmp_path / "quantised", VARIANTS["GPTQ"], only=only)
    config = json.loads((quantised / "config.json").read_text())
    if place == "text_config":
        config["text_config"]["quantization_config"] = config.pop("quantization_config")
        (quantised / "config.json").write_text(json.dumps(config))
    assert_equal(parameters(quantised), parameters(twin))
    served = examine(quantised)
    assert served.num_weight_bytes == examine(twin).num_weight_bytes
    assert "dequantised to float32 at load" in str(served.quantisation)


@pytest.mark.filterwarnings("ignore")
def test_experts_of_gpt_oss_are_read_from_mxfp4(tmp_path: Path) -> None:
    source = make_foreign_checkpoint(tmp_path / "source", "gpt_oss", seed=3)
    variant = Variant({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4)
    quantised, twin = quantise(source, tmp_path / "mxfp4", variant, only=("gate_up_proj", "down_proj"))
    assert_equal(parameters(quantised), parameters(twin))
    assert answers(quantised) == answers(twin)
    assert examine(quantised).quantisation == "MXFP4 (mxfp4), dequantised to float32 at load"


def test_models_of_transformers_read_fp8_of_compressed_tensors(tmp_path: Path) -> None:
    source = make_foreign_checkpoint(tmp_path / "source", "olmo2", seed=3)
    fp8 = make_fp8(source, tmp_path / "fp8", quantization())
    assert_equal(parameters(fp8), parameters(make_twin(fp8, tmp_path / "twin")))


def test_experts_of_our_own_decoder_are_dequantised(tmp_path: Path) -> None:
    source = make_foreign_checkpoint(tmp_path / "source", "qwen3_moe", seed=3)
    quantised, twin = quantise(source, tmp_path / "quantised", VARIANTS["FP8 blocks"])
    assert_equal(parameters(quantised), parameters(twin))


def test_mxfp4_of_experts_is_that_of_transformers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 2), generator=generator, dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "model.safetensors")
    scheme = read_scheme({"quantization_config": {"quant_method": "mxfp4"}})
    assert isinstance(scheme, Scheme)
    weights = QuantisedCheckpoint(Checkpoint(tmp_path), scheme, chunk_numbers=64 * 10)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert weights.names() == {name}
    assert weights.shape(name) == list(expected.shape)
    assert torch.equal(weights.tensor(name), expected)


def test_loading_needs_no_more_than_the_16_bit_model_and_a_shard(tmp_path: Path) -> None:
    """The bytes that are allocated at any time; what is stored is mapped, and not among them."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32}
    for name in ("GPTQ in order", "NF4"):
        quantised, _ = made(tmp_path / name, name, **sizes)
        raw = json.loads((quantised / "config.json").read_text())
        scheme = read_scheme(raw)
        assert isinstance(scheme, Scheme)
        weights = QuantisedCheckpoint(Checkpoint(quantised), scheme, chunk_numbers=4096)
        weights.dtype = "bfloat16"
        architecture = find_architecture(raw)
        assert architecture is not None
        with torch.device("meta"):
            model = architecture.build(architecture.read_config(raw), Head.OWN, SingleRank())
        model.to(torch.bfloat16)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            load_weights(model, weights, CPU)
        num_bytes = sum(each.nbytes for each in model.parameters())
        shard = (quantised / "model.safetensors").stat().st_size
        assert num_bytes * 0.5 < most_allocated(profiled) < num_bytes + shard


def most_allocated(profiled: Any) -> int:
    """Return the most bytes of tensors that were allocated at one time."""
    events = profiled.profiler.kineto_results.events()
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    total = most = 0
    for _, num_bytes in changes:
        total += num_bytes
        most = max(most, total)
    return most


async def test_a_plain_model_takes_no_kv_of_its_quantised_one(tmp_path: Path) -> None:
    """The scheme stands in config.json, which the fingerprint of a model has in it."""
    quantised, twin = made(tmp_path, "AWQ")
    plain = {"model": twin, "dtype": "float32"}
    async with running_pair(quantised, sides=Sides({"dtype": "float32"}, plain)) as pair:
        _, rest = await pair.ask("refused", list(range(40)), SamplingParams(temperature=0.0, max_tokens=4))
        assert rest[-1].error_kind == ErrorKind.INCOMPATIBLE
        assert "model_fingerprint: ours is " in (rest[-1].error_message or "")
        await pair.prefill.abort("refused", 0)
        await pair.until_free()


def test_fp8_in_blocks_is_not_multiplied_as_fp8(tmp_path: Path) -> None:
    quantised, _ = made(tmp_path, "FP8 blocks")
    with pytest.raises(SettingError, match="fp8_products is on, but weights in FP8 in blocks of 48 x 40"):
        load(quantised, "auto", None, CPU, fp8_products="on")


def test_the_last_word_and_block_may_be_half_full(tmp_path: Path) -> None:
    """Vocabularies are seldom multiples of anything, and heads may be quantised too."""
    config = {**VARIANTS["FP8 blocks"].config, "modules_to_not_convert": None}
    for name, variant in {
        "fp8": Variant(config, fp8_blocks("weight_scale_inv", BLOCK)),
        "int4": Variant(
            {**VARIANTS["int4 in groups with zeros"].config, "ignore": []},
            VARIANTS["int4 in groups with zeros"].pack,
        ),
    }.items():
        source = make_checkpoint(tmp_path / f"{name}-source", seed=3, vocab_size=261)
        quantised, twin = quantise(source, tmp_path / name, variant, only=("proj.weight", "lm_head.weight"))
        assert_equal(parameters(quantised), parameters(twin))


def test_a_bias_of_zeros_that_the_model_lacks_is_left_out(tmp_path: Path) -> None:
    quantised, _ = made(tmp_path, "GPTQ in 8 bits")
    file = quantised / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.bias"
    assert not tensors[name].any()
    for dtype in (torch.bfloat16, torch.float16):
        save_file(tensors | {name: tensors[name].to(dtype)}, file)
        parameters(quantised)
        examine(quantised)
    save_file(tensors | {name: tensors[name] + 1}, file)
    for read in (parameters, examine):
        with pytest.raises(SettingError, match=f"has unexpected 1 tensors: {name}"):
            read(quantised)
