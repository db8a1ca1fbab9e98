"""The most used open models in the forms in which they are published: ``kvbaton check`` promises what the loader keeps.

Each row has the architecture and the model_type of its config.json, its quantisation, and a tensor of what the file has
beside the model (draft layers). Sizes are small, weights random.
"""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from contract.errors import SettingError
from engine.models.loading import load
from engine.models.served import examine
from tests.chaos.settings import chaos_rng
from tests.checkpoints import write_checkpoint
from tests.engine_compute.test_served import is_cached_as_loaded
from tests.families.tiny_models import make_tiny
from tests.quantised_checkpoints import VARIANTS, quantise
from tests.soak_settings import soak_factor

CPU = torch.device("cpu")
NO_TINY_MODEL = ("deepseek_v32", "glm_moe_dsa", "glm5_next")
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
_MXFP4 = {"quant_method": "mxfp4"}


@dataclass(frozen=True)
class Published:
    """A model as it is published. family: of the tiny model. quantisation: a key of VARIANTS, or fields of config.json.

    text_type: the model_type of its text_config, where transformers has another one. beside: the name of a tensor.
    """

    family: str
    architecture: str
    quantisation: str | dict[str, Any] | None = None
    text_type: str = ""
    beside: str = ""
    config: dict[str, Any] = field(default_factory=dict)


TABLE = {
    "Qwen3.6-35B-A3B": Published(
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", beside="mtp.norm.weight"
    ),
    "Qwen3.6-35B-A3B-FP8": Published("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "FP8 blocks"),
    "Qwen3.6-27B": Published("qwen3_5", "Qwen3_5ForConditionalGeneration", beside="mtp.norm.weight"),
    "Qwen3-VL-2B": Published("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    "Qwen3-VL-2B-FP8": Published("qwen3_vl", "Qwen3VLForConditionalGeneration", "FP8 blocks"),
    "Qwen3-VL-30B-A3B": Published("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    "Gemma 4 31B": Published("gemma4", "Gemma4ForConditionalGeneration"),
    "Gemma 4 31B W4A16": Published("gemma4", "Gemma4ForConditionalGeneration", "int4 in groups"),
    "Gemma 4 12B": Published("gemma4_unified", "Gemma4UnifiedForConditionalGeneration"),
    "gpt-oss in bfloat16": Published("gpt_oss", "GptOssForCausalLM"),
    "gpt-oss without its scales": Published("gpt_oss", "GptOssForCausalLM", _MXFP4),
    "Qwen3-8B": Published("qwen3", "Qwen3ForCausalLM"),
    "Qwen3-8B-FP8": Published("qwen3", "Qwen3ForCausalLM", "FP8 blocks"),
    "Qwen3-8B-AWQ": Published("qwen3", "Qwen3ForCausalLM", "AWQ"),
    "Qwen2.5-7B-GPTQ": Published("qwen2", "Qwen2ForCausalLM", "GPTQ"),
    "Qwen3-30B-A3B": Published("qwen3_moe", "Qwen3MoeForCausalLM"),
    "DeepSeek V4": Published("deepseek_v4", "DeepseekV4ForCausalLM", "FP8 blocks"),
    "DeepSeek V3": Published(
        "deepseek_v3", "DeepseekV3ForCausalLM", "FP8 blocks", beside="model.layers.61.hnorm.weight"
    ),
    "DeepSeek V3.2": Published("deepseek_v32", "DeepseekV32ForCausalLM"),
    "GLM-4.7-Flash": Published(
        "glm4_moe_lite", "Glm4MoeLiteForCausalLM", beside="model.layers.47.hnorm.weight"
    ),
    "GLM-4.6": Published("glm4_moe", "Glm4MoeForCausalLM", beside="model.layers.92.hnorm.weight"),
    "GLM-5": Published("glm_moe_dsa", "GlmMoeDsaForCausalLM"),
    "GLM-5.3-Flash": Published("glm5_next", "Glm5NextForConditionalGeneration"),
    "Kimi K2.6": Published("kimi_k25", "KimiK25ForConditionalGeneration", "int4 in groups", "kimi_k2"),
    "Kimi K3": Published("kimi_linear", "KimiK3ForConditionalGeneration", config={"model_type": "kimi_k3"}),
    "Kimi Linear": Published("kimi_linear", "KimiLinearForCausalLM"),
    "MiniMax M2.5": Published("minimax_m2", "MiniMaxM2ForCausalLM", "FP8 blocks"),
    "MiniMax M3": Published("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration"),
    "MiMo-V2-Flash": Published("mimo_v2_flash", "MiMoV2FlashForCausalLM", "FP8 blocks"),
    "Hy3": Published("hy_v3", "HYV3ForCausalLM", beside="model.layers.80.hnorm.weight"),
    "Hy4": Published("hy_v4", "HYV4ForCausalLM"),
    "Ministral 3": Published("mistral3", "Mistral3ForConditionalGeneration", "FP8 by tensor"),
    "Mistral Large 3 NVFP4": Published("mistral3", "Mistral3ForConditionalGeneration", _MODELOPT),
    "Llama 3.1": Published("llama", "LlamaForCausalLM"),
    "Llama 4": Published("llama4", "Llama4ForConditionalGeneration"),
    "Nemotron 3 Nano": Published("nemotron_h", "NemotronHForCausalLM"),
    "Nemotron 3 Nano NVFP4": Published("nemotron_h", "NemotronHForCausalLM", _MODELOPT),
    "Granite 4 H": Published("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "LFM2": Published("lfm2", "Lfm2ForCausalLM"),
    "LFM2-8B-A1B": Published("lfm2_moe", "Lfm2MoeForCausalLM"),
    "SmolLM3": Published("smollm3", "SmolLM3ForCausalLM"),
    "OLMo 3": Published("olmo3", "Olmo3ForCausalLM"),
    "Phi-4-mini": Published("phi3", "Phi3ForCausalLM"),
    "Ernie 4.5": Published("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", beside="model.mtp_block.0.norm.weight"),
    "Seed-OSS": Published("seed_oss", "SeedOssForCausalLM"),
    "EXAONE 4": Published("exaone4", "Exaone4ForCausalLM"),
    "Hunyuan": Published("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
}


def written(folder: Path, model: Published) -> Path:
    """Write the checkpoint; of a family of which there is no tiny model, its config.json and one tensor."""
    plain = folder / "plain"
    if model.family in NO_TINY_MODEL:
        plain.mkdir(parents=True)
        CONFIG_MAPPING[model.family]().save_pretrained(plain)
        save_file({"model.norm.weight": torch.ones(64)}, plain / "model.safetensors")
    else:
        write_checkpoint(plain, make_tiny(model.family), 3)
    if model.beside:
        file = plain / "model.safetensors"
        save_file({**load_file(file), model.beside: torch.ones(64)}, file)
    made = plain
    fields: dict[str, Any] = {"architectures": [model.architecture], **model.config}
    if isinstance(model.quantisation, str):
        made, _ = quantise(plain, folder / "made", VARIANTS[model.quantisation], only="_proj.weight")
    elif model.quantisation is not None:
        fields["quantization_config"] = model.quantisation
    config = json.loads((made / "config.json").read_text()) | fields
    if model.text_type:
        config["text_config"]["model_type"] = model.text_type
    (made / "config.json").write_text(json.dumps(config))
    return made


def difference(folder: Path) -> str | None:
    """Return how the check's verdict and the loader's differ; None if they do not."""
    refusals: list[str | None] = []
    found: list[Any] = []
    for read in (partial(examine, folder, "float32"), partial(load, folder, "float32", None, CPU)):
        try:
            found.append(read())
            refusals.append(None)
        except SettingError as error:
            refusals.append(error.message)
    if refusals[0] != refusals[1]:
        return f"the check says {refusals[0]!r}, the loader {refusals[1]!r}"
    if found and not (found[0].is_tried and is_cached_as_loaded(*found)):
        return f"the check promises {found[0]}, and the loader keeps {found[1].config}"
    return None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_the_check_promises_what_the_loader_keeps(tmp_path: Path) -> None:
    """Both refuse a model in the same words, or serve it with the same windows. A soak tries all, else a third."""
    num_tried = len(TABLE) if soak_factor() > 1 else len(TABLE) // 3
    names = chaos_rng("published models").sample(list(TABLE), num_tried)
    differences = {name: difference(written(tmp_path / name, TABLE[name])) for name in names}
    assert not {name: told for name, told in differences.items() if told is not None}
