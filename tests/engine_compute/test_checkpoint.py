"""Reading a checkpoint folder: what is accepted, and the error for what is not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.errors import SettingError
from engine.models.checkpoint import Checkpoint, read_config, read_eos_token_ids, resolve_dtype
from engine.models.loading import LoadedModel, load
from tests.checkpoints import EOS_ID, make_checkpoint

CPU = torch.device("cpu")


def load_on_cpu(folder: Path, dtype: str = "auto", max_model_len: int | None = None) -> LoadedModel:
    return load(folder, dtype, max_model_len, CPU)


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_missing_folder_config_and_weights(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="is not a folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(SettingError, match=r"has no config\.json") as caught:
        read_config(tmp_path)
    assert caught.value.param == "model"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SettingError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SettingError, match="JSON object"):
        read_config(tmp_path)
    with pytest.raises(SettingError, match=r"neither model\.safetensors nor"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, (5,)),
        ({"eos_token_id": [5, 7, 5]}, {"eos_token_id": 6}, (5, 7)),
        ({}, {"eos_token_id": 6}, (6,)),
        (None, {"eos_token_id": [6, 8]}, (6, 8)),
        (None, {}, ()),
    ],
)
def test_eos_ids(tmp_path: Path, generation: Any, config: Any, ids: tuple[int, ...]) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_token_ids(tmp_path, config) == ids


def test_invalid_eos_ids_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="eos_token_id is '</s>'"):
        read_eos_token_ids(tmp_path, {"eos_token_id": "</s>"})


def test_errors_name_missing_and_unexpected_tensors(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    weights = load_file(folder / "model.safetensors")
    without = {name: tensor for name, tensor in weights.items() if "layers.1.mlp" not in name}
    save_file(without, folder / "model.safetensors")
    with pytest.raises(SettingError, match=r"misses 3 tensors: model\.layers\.1\.mlp\.down_proj\.weight"):
        load_on_cpu(folder)
    save_file(weights | {"model.layers.0.moe.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(SettingError, match=r"unexpected 1 tensors: model\.layers\.0\.moe\.weight"):
        load_on_cpu(folder)
    save_file(weights | {"model.norm.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(SettingError, match=r"model\.norm\.weight is \[2\]; config\.json requires \[64\]"):
        load_on_cpu(folder)


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    weights = load_file(folder / "model.safetensors")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(weights | extra, folder / "model.safetensors")
    assert load_on_cpu(folder).config.num_layers == 2


def test_errors_name_the_broken_file(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a", max_shard_size="60KB")
    shard = next(folder.glob("model-00002-*.safetensors"))
    shard.write_bytes(b"not safetensors")
    with pytest.raises(SettingError, match=f"{shard.name} cannot be read as safetensors"):
        load_on_cpu(folder)
    shard.unlink()
    with pytest.raises(SettingError, match=f"lacks the shard {shard.name}"):
        load_on_cpu(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(SettingError, match="has no weight_map"):
        load_on_cpu(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_dtype_is_that_of_the_checkpoint(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_checkpoint(tmp_path, dtype=dtype)
    loaded = load_on_cpu(folder)
    assert loaded.info.dtype == str(dtype).removeprefix("torch.")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}


def test_auto_dtype_if_the_configuration_has_none(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    assert resolve_dtype("auto", {}, Checkpoint(folder)) == "bfloat16"
    assert resolve_dtype("auto", {"torch_dtype": "float16"}, Checkpoint(folder)) == "float16"
    assert resolve_dtype("float32", {"dtype": "float16"}, Checkpoint(folder)) == "float32"
    with pytest.raises(SettingError, match="dtype is float64"):
        resolve_dtype("auto", {"dtype": "float64"}, Checkpoint(folder))


def test_weights_that_need_no_conversion_stay_memory_mapped(tmp_path: Path) -> None:
    """The pages are those of the file: a byte that is changed in the file after loading is changed in the model."""
    folder = make_checkpoint(tmp_path)
    loaded = load_on_cpu(folder)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    norm = loaded.model.get_parameter("model.norm.weight")
    needle = norm.detach().numpy().tobytes()
    assert content.count(needle) == 1
    with file.open("r+b") as stream:
        stream.seek(content.index(needle))
        stream.write(torch.full((1,), 42.0).numpy().tobytes())
    assert norm[0].item() == 42.0


def test_model_info(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    info = load_on_cpu(folder, max_model_len=100).info
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (264, 100, (EOS_ID, 260))
    assert load_on_cpu(folder).info.max_model_len == 256
    assert load_on_cpu(folder, dtype="float16").info.fingerprint != info.fingerprint
    with pytest.raises(SettingError, match=r"max_model_len is 257; .* 2\.\.256"):
        load_on_cpu(folder, max_model_len=257)


def test_a_tied_checkpoint_with_its_own_head_uses_that_head(tmp_path: Path) -> None:
    """Two different tensors stay two tensors, as in transformers, even if the configuration declares them tied."""
    folder = make_checkpoint(tmp_path)
    change_config(folder, tie_word_embeddings=True)
    assert load_on_cpu(folder).model.get_parameter("lm_head.weight") is not None
