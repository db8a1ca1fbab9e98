"""The verdict that ``examine`` gives without torch is the loader's."""

import json
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from contract.cache_layout import CacheLayout
from contract.errors import SettingError
from engine.distributed.group import SingleRank
from engine.models.config import Head
from engine.models.loading import LoadedModel, load
from engine.models.registry import ARCHITECTURES, find_architecture
from engine.models.served import Served, examine
from engine.models.transformers_rules import why_unserved
from engine.models.transformers_types import TRIED
from tests.chaos.settings import chaos_rng
from tests.checkpoints import FAMILIES, make_checkpoint, make_foreign_checkpoint
from tests.engine_compute.test_checkpoint import change_config, load_on_cpu
from tests.fakes.engine.local_ranks import Exchange, LocalRankGroup
from tests.fp8_checkpoints import make_fp8, quantization
from tests.quantised_checkpoints import VARIANTS, quantise
from tests.soak_settings import soak_factor

SMALL = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_num_experts": 4,
    "moe_k": 2,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "sliding_window": 6,
    "rotary_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "embedding_size": 64,
}
MAX_PARAMETERS = 60_000_000


_FOREIGN = ("gpt_neox", "qwen3_moe", "glm4_moe_lite", "gemma3", "gpt_oss", "llama4", "phi3")


def is_cached_as_loaded(served: Served, loaded: LoadedModel) -> bool:
    """Return whether the groups of layers are those of the loaded model."""
    shape = loaded.config
    if served.cache is None:  # unknown: the code of the model derives them
        return len(shape.kv_shapes) > 0
    layout = served.cache.groups[0].layout
    if not shape.kv_shapes:
        length = loaded.info.max_model_len
        return served.cache == CacheLayout.of(layout, shape.sliding_windows, max_model_len=length)
    layouts = [replace(layout, parts=kv, num_kv_heads=num, head_dim=dim) for kv, num, dim in shape.kv_shapes]
    return served.cache == CacheLayout.of_layers(layouts, shape.sliding_windows)


def outcome(make: Callable[[], Any]) -> str | None:
    """Return the text of the refusal, None if there is none."""
    try:
        make()
    except SettingError as error:
        return error.message
    return None


def assert_same_verdict(folder: Path) -> Served | None:
    """Return the verdict of ``examine``; its refusal and the loader's are the same sentence."""
    promised = outcome(lambda: examine(folder))
    assert promised == outcome(lambda: load_on_cpu(folder)), promised
    return None if promised else examine(folder)


@pytest.mark.parametrize("family", FAMILIES)
@given(
    num_layers=st.integers(1, 3),
    num_heads=st.sampled_from([2, 4, 6]),
    share=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([8, 16, 32]),
    has_bias=st.booleans(),
    head=st.sampled_from(Head),
)
def test_the_listed_tensors_are_those_of_the_model(
    family: str, num_layers: int, num_heads: int, share: int, head_dim: int, has_bias: bool, head: Head
) -> None:
    raw = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "vocab_size": 50,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // share,
        "head_dim": head_dim,
        "max_position_embeddings": 64,
        "attention_bias": has_bias,
        "mlp_bias": has_bias,
    }
    architecture = find_architecture(raw)
    assert architecture is not None
    config = architecture.read_config(raw)
    with torch.device("meta"):
        model = architecture.build(config, head, SingleRank())
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert dict(architecture.shapes(config, head)) == built


@pytest.mark.parametrize("family", [*FAMILIES, *_FOREIGN])
def test_what_is_served_has_the_sizes_that_are_loaded(tmp_path: Path, family: str) -> None:
    is_own = family in (*FAMILIES, "qwen3_moe")
    folder = (make_checkpoint if family in FAMILIES else make_foreign_checkpoint)(tmp_path, family)
    served = assert_same_verdict(folder)
    assert served is not None and served.is_own is is_own and served.is_tried
    loaded = load_on_cpu(folder)
    shape = loaded.config
    num_bytes = shape.num_layers * prod(shape.cache_shape(1, 1)) * 4
    assert (served.kv_bytes_per_token, served.max_model_len) == (num_bytes, loaded.info.max_model_len)
    assert served.dtype == loaded.info.dtype
    assert is_cached_as_loaded(served, loaded)


QUANTISED = [
    {"quant_method": "fp8", "weight_block_size": [128, 0], "activation_scheme": "dynamic"},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
    {"quant_method": "gptq", "bits": 3, "group_size": 128},
    {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq:zp"},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
    {"quant_method": "awq", "bits": 4, "group_size": 128},
    {"quant_method": "hqq"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"quant_method": "mxfp4"},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}},
]


@pytest.mark.parametrize(
    "quantisation", QUANTISED, ids=lambda one: f"{one['quant_method']}-{one.get('format')}"
)
def test_quantised_forms_are_refused_as_they_are_loaded(tmp_path: Path, quantisation: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    change_config(folder, quantization_config=quantisation)
    assert assert_same_verdict(folder) is None


def test_quantised_models_of_transformers_are_refused(tmp_path: Path) -> None:
    folder = make_foreign_checkpoint(tmp_path, "olmo2")
    change_config(folder, quantization_config=QUANTISED[0])
    assert assert_same_verdict(folder) is None


def test_fp8_is_served_with_its_scales_and_refused_without(tmp_path: Path) -> None:
    folder = make_fp8(make_checkpoint(tmp_path / "source"), tmp_path / "fp8", quantization())
    served = assert_same_verdict(folder)
    assert served is not None and served.quantisation == "FP8 (compressed-tensors)"
    change_config(folder, quantization_config=None)
    assert assert_same_verdict(folder) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 0}, "rope_parameters": None},
        {"rope_scaling": {"rope_type": "dynamic"}, "rope_parameters": None},
        {"hidden_act": "gelu"},
        {"num_hidden_layers": 3},
        {"vocab_size": 300},
        {"is_causal": False},
        {"dtype": "int8"},
        {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"},
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
        {"architectures": ["BertModel"]},
        {"architectures": []},
    ],
    ids=str,
)
def test_other_refusals_are_those_of_the_loader(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path)
    change_config(folder, **fields)
    assert assert_same_verdict(folder) is None


def test_latents_for_fewer_kv_heads_than_heads_are_refused(tmp_path: Path) -> None:
    """A latent gives each head a key of its own, and transformers would repeat them."""
    folder = make_foreign_checkpoint(tmp_path, "deepseek_v3")
    change_config(folder, num_key_value_heads=2)
    assert assert_same_verdict(folder) is None
    refused = str(outcome(lambda: examine(folder)))
    assert "latent attention with 2 KV heads (num_key_value_heads) for 4 heads is not served" in refused


def test_the_weights_of_draft_layers_are_not_counted(tmp_path: Path) -> None:
    """The loader does not read them: the file of GLM-4.7-Flash has a layer 47, of its draft model."""
    folder = make_foreign_checkpoint(tmp_path, "glm4_moe_lite")
    plain = examine(folder).num_weight_bytes
    file = folder / "model.safetensors"
    save_file({**load_file(file), "model.layers.47.hnorm.weight": torch.ones(64)}, file)
    served = assert_same_verdict(folder)
    assert served is not None and served.num_weight_bytes == plain


def test_a_folder_without_weights_is_read_from_its_configuration(tmp_path: Path) -> None:
    for family, make in (("qwen3", make_checkpoint), ("olmo2", make_foreign_checkpoint)):
        folder = make(tmp_path / family, family)
        whole = examine(folder)
        (folder / "model.safetensors").unlink()
        bare = examine(folder)
        assert (bare.has_weights, whole.has_weights) == (False, True)
        assert bare.kv_bytes_per_token == whole.kv_bytes_per_token
    change_config(tmp_path / "qwen3", quantization_config={"quant_method": "awq"})
    assert "bits is None; only 4 is served" in str(outcome(lambda: examine(tmp_path / "qwen3")))


@pytest.mark.parametrize("is_quantised", [False, True], ids=["plain", "quantised"])
def test_nothing_imports_torch(tmp_path: Path, is_quantised: bool) -> None:
    """Also where a bias must be compared with the zeros of a quantisation; numpy has no bfloat16."""
    folder = make_checkpoint(tmp_path / "plain", "qwen3", dtype=torch.bfloat16)
    if is_quantised:
        folder, _ = quantise(folder, tmp_path / "quantised", VARIANTS["GPTQ"])
        file = folder / "model.safetensors"
        tensors = load_file(file)
        biases = {
            name: torch.zeros_like(each, dtype=torch.bfloat16)
            for name, each in tensors.items()
            if name.endswith(".bias")
        }
        assert biases
        save_file(tensors | biases, file)
    program = (
        "import sys; from pathlib import Path; from engine.models.served import examine\n"
        f"examine(Path({str(folder)!r})); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def small_model(model_type: str) -> Any:
    """Return a small random model of a type of transformers. Raises whatever its classes raise."""
    config_class = CONFIG_MAPPING[model_type]
    usual = config_class()
    given: dict[str, Any] = {
        name: value
        for name, value in SMALL.items()
        if isinstance(getattr(usual, name, None), int) and not isinstance(getattr(usual, name), bool)
    }
    if "kv_lora_rank" in given:
        given |= {"num_key_value_heads": SMALL["num_attention_heads"], "num_experts_per_tok": 2}
        given["head_dim"] = SMALL["qk_rope_head_dim"]
    tokens: dict[str, Any] = {
        name: 1 for name in ("pad_token_id", "bos_token_id", "eos_token_id") if hasattr(usual, name)
    }
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    config = config_class(**given, **tokens)
    with torch.device("meta"):
        if sum(each.numel() for each in model_class(config).parameters()) > MAX_PARAMETERS:
            raise ValueError("it is too large")
    return model_class(config)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_every_type_of_transformers_gets_the_verdict_of_the_loader(tmp_path: Path) -> None:
    """Both refuse in the same words, and a type that was tried is loaded as promised. A soak tries all, else a quarter."""
    wrong = []
    num_served = num_refused = 0
    types = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    num_tried = len(types) if soak_factor() > 1 else len(types) // 4
    for model_type in chaos_rng("types of transformers").sample(types, num_tried):
        folder = tmp_path / model_type
        try:
            small_model(model_type).save_pretrained(folder)
        except Exception:  # noqa: BLE001 - the test's small sizes suit not every class
            continue
        promised = outcome(lambda folder=folder: examine(folder))  # type: ignore[misc]
        found = outcome(lambda folder=folder: load(folder, "float32", None, torch.device("cpu")))  # type: ignore[misc]
        num_served += found is None
        num_refused += found is not None
        is_kept = found is None or not examine(folder).is_tried if promised is None else promised == found
        if not is_kept:
            wrong.append((model_type, promised, found))
    assert not wrong
    assert min(num_served, num_refused) > num_tried / 10


def test_the_configuration_of_a_folder_is_read_only(tmp_path: Path) -> None:
    """A code file in the folder is not run by the process that reads the configuration."""
    folder = make_foreign_checkpoint(tmp_path, "olmo2")
    (folder / "own.py").write_text("raise SystemExit('this has been run')")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "own.Config"}}))
    assert examine(folder).architecture == "Olmo2ForCausalLM"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_type": "qwen9"}, "its model_type is 'qwen9', and transformers 5"),
        ({"model_type": ["a"]}, "its model_type is ['a'], and transformers 5"),
        ({"architectures": ["Qwen9ForCausalLM"]}, "has none of that name"),
        ({"layer_types": ["full_attention"] * 9}, "transformers cannot run it so"),
    ],
    ids=str,
)
def test_models_of_newer_versions_are_named_in_one_line(
    tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    """The last line of a start is the reason, and errors of transformers have several."""
    folder = make_foreign_checkpoint(tmp_path, "olmo2")
    change_config(folder, **fields)
    assert assert_same_verdict(folder) is None
    refused = str(outcome(lambda: examine(folder)))
    assert told in refused and "\n" not in refused


def test_each_type_of_this_transformers_was_tried_or_is_refused() -> None:
    """The verdict of ``kvbaton check`` depends on no start."""
    undecided = []
    for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if architecture in ARCHITECTURES or not architecture.endswith(("ForCausalLM", "LMHeadModel")):
            continue
        try:
            config = CONFIG_MAPPING[model_type]()
            reason = why_unserved(config) or why_unserved(config.get_text_config())
            is_decided = model_type in TRIED or reason is not None
        except Exception:  # noqa: BLE001 - a class that cannot be made without more fields is none for a check
            continue
        if not is_decided:
            undecided.append(model_type)
    assert undecided == []


def test_the_configuration_is_read_without_the_code_of_packages(tmp_path: Path) -> None:
    """Importing transformers takes twice as long as the rest of a check."""
    folder = make_foreign_checkpoint(tmp_path, "olmo2")
    program = (
        "import sys; from engine.models.facts_program import main\n"
        f"sys.argv = ['', {str(folder)!r}]; main()\n"
        "sys.exit('transformers.dependency_versions_check' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_model_of_transformers_is_refused_on_several_ranks_before_a_start(tmp_path: Path) -> None:
    folder = make_foreign_checkpoint(tmp_path, "olmo2")
    group = LocalRankGroup(0, Exchange(2))
    refused = [
        outcome(lambda: examine(folder, num_ranks=2)),
        outcome(lambda: load(folder, "auto", None, torch.device("cpu"), group)),
    ]
    assert "Olmo2ForCausalLM is computed by transformers, on one rank alone" in str(refused[0])
    assert refused[0] == refused[1]
    assert outcome(lambda: examine(make_checkpoint(tmp_path / "own"), num_ranks=4)) is None


def test_the_experts_of_a_group_are_counted_as_they_are_spread(tmp_path: Path) -> None:
    folder = make_foreign_checkpoint(tmp_path, "qwen3_moe")
    served = examine(folder, num_ranks=2, data_parallel_size=4)
    # Two layers of four experts, each of three products of 64 by 32 numbers of four bytes.
    assert served.num_expert_bytes == 2 * 4 * 3 * 64 * 32 * 4
    assert served.num_weight_bytes is not None
    rest = served.num_weight_bytes - served.num_expert_bytes
    assert served.rank_weight_bytes(2, 4) == (rest + served.num_expert_bytes // 4) // 2
    assert served.rank_weight_bytes(1, 1) == served.num_weight_bytes
    (folder / "model.safetensors").unlink()
    assert examine(folder, data_parallel_size=4).num_expert_bytes == served.num_expert_bytes
