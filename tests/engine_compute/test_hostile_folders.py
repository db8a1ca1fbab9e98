"""Malicious model folders: each is rejected with one error that names the problem, before memory or time is spent."""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save_file

from contract.errors import SettingError
from engine.models.loading import load
from tests.checkpoints import make_checkpoint, make_foreign_checkpoint
from tests.engine_compute.driver import Driver

MAX_PEAK_BYTES = 64 * 2**20
INDEX = "model.safetensors.index.json"


def set_fields(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def set_text(name: str, content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(content)

    return change


def replace_by_pipe(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def map_weights_to(name: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "weights")
        (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))

    return change


def drop_a_mapped_tensor(folder: Path) -> None:
    """Write an index that places a tensor in a file without it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file.name)}))
    del tensors["model.norm.weight"]
    save_file(tensors, file)


def declare(header: dict[str, Any], num_bytes: int = 8, length: int | None = None) -> Callable[[Path], None]:
    """Write a safetensors file with this header and ``num_bytes`` bytes of data."""

    def change(folder: Path) -> None:
        text = json.dumps(header).encode()
        size = len(text) if length is None else length
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + text + bytes(num_bytes))

    return change


def tensor(shape: list[int], end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"model.norm.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


HOSTILE: list[tuple[Callable[[Path], None], str]] = [
    (set_fields(num_hidden_layers=10**9), "num_hidden_layers is 1000000000; at most 4096"),
    (set_fields(num_hidden_layers=4000), "num_hidden_layers is 4000; the checkpoint has 21 tensors"),
    (set_fields(num_hidden_layers=-1), "num_hidden_layers is -1"),
    (set_fields(num_hidden_layers=1e9), "num_hidden_layers is 1000000000.0"),
    (set_fields(num_hidden_layers=True), "num_hidden_layers is True"),
    (set_fields(num_hidden_layers="2"), "num_hidden_layers is '2'"),
    (set_fields(vocab_size=10**30), "vocab_size is 1000000000000000000000000000000"),
    (set_fields(vocab_size=2**30), r"is \[264, 64\]; config.json requires"),
    (set_fields(hidden_size=0), "hidden_size is 0"),
    (set_fields(intermediate_size=2**31 - 1), "config.json requires"),
    (set_fields(num_key_value_heads=3), "num_attention_heads is 4"),
    (set_fields(max_position_embeddings=2**80), "max_position_embeddings is"),
    (set_fields(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    (set_fields(rms_norm_eps=float("inf")), "rms_norm_eps is inf"),
    (set_fields(rms_norm_eps=-1.0), "rms_norm_eps is -1.0"),
    (set_fields(num_experts=10**18), "num_experts is 1000000000000000000"),
    (set_fields(architectures=[["LlamaForCausalLM"]]), "architecture"),
    (set_text("generation_config.json", '{"eos_token_id": ["</s>"]}'), "eos_token_id"),
    (
        set_text("generation_config.json", '{"eos_token_id": -1}'),
        "generation_config.json cannot be read: eos_token_id is -1",
    ),
    (set_text("generation_config.json", f'{{"eos_token_id": {10**30}}}'), "eos_token_id is 1000000000"),
    (set_text("config.json", '{"a":' * 5000 + "1" + "}" * 5000), "config.json"),
    (set_text("config.json", "\udcff".encode("utf-8", "surrogateescape").decode("latin-1")), "config.json"),
    (set_text("generation_config.json", "[" * 100_000), "generation_config.json"),
    (replace_by_pipe("config.json"), "config.json is a pipe"),
    (replace_by_pipe("generation_config.json"), "generation_config.json is a pipe"),
    (replace_by_pipe("model.safetensors"), "model.safetensors is a pipe"),
    (replace_by_pipe("adapter_config.json"), "adapter_config.json is a pipe"),
    (replace_by_pipe(INDEX), f"{INDEX} is a pipe"),
    (map_weights_to("../weights"), "outside the folder"),
    (map_weights_to("/etc/passwd"), "outside the folder"),
    (drop_a_mapped_tensor, f"model.safetensors has no tensor model.norm.weight, which {INDEX} places there"),
    (map_weights_to("nowhere.safetensors"), "lacks the shard nowhere.safetensors"),
    (map_weights_to(7), "names '7' as a file|lacks the shard 7"),
    (declare(tensor([2**62, 4], 8)), "model.safetensors cannot be read as safetensors"),
    (declare(tensor([2**40], 8)), "model.safetensors cannot be read as safetensors"),
    (declare(tensor([-1], 8)), "model.safetensors cannot be read as safetensors"),
    (declare(tensor([2], 2**40)), "model.safetensors cannot be read as safetensors"),
    (declare(tensor([2], 8, "F0")), "model.safetensors cannot be read as safetensors"),
    (declare(tensor([2], 8), length=2**62), "model.safetensors cannot be read as safetensors"),
    (declare(tensor([2], 8), length=0), "model.safetensors cannot be read as safetensors"),
]


@pytest.mark.parametrize(("harm", "words"), HOSTILE)
def test_a_malicious_folder_is_rejected_by_name(
    tmp_path: Path, harm: Callable[[Path], None], words: str
) -> None:
    """L8: every claim of a folder is checked before anything is built, opened or waited for."""
    folder = make_checkpoint(tmp_path / "model")
    harm(folder)
    tracemalloc.start()
    try:
        with pytest.raises(SettingError, match=words) as caught:
            load(folder, "auto", None, torch.device("cpu"))
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES
    finally:
        tracemalloc.stop()
    assert caught.value.param == "model"
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 4096"),
        ({"num_attention_heads": 2**40}, "num_attention_heads is 1099511627776"),
        ({"hidden_size": -1}, "config.json: hidden_size is -1"),
        ({"intermediate_size": 10**30}, "config.json: intermediate_size is 1000000000"),
        ({"vocab_size": 0}, "config.json: vocab_size is 0"),
        ({"head_dim": -4}, "config.json: head_dim is -4"),
        ({"max_position_embeddings": -7}, "config.json: max_position_embeddings is -7"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1000000000; at most 4096"),
    ],
)
def test_a_malicious_transformers_folder_is_rejected_by_name(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    """L8: transformers builds the layers before it looks at the weights."""
    folder = make_foreign_checkpoint(tmp_path / "model", "phi3")
    set_fields(**fields)(folder)
    with pytest.raises(SettingError, match=words):
        load(folder, "auto", None, torch.device("cpu"))


_NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.booleans() | st.none() | st.text(max_size=5)
_FIELDS = st.sampled_from(
    [
        "num_hidden_layers",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "sliding_window",
        "torch_dtype",
        "tie_word_embeddings",
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(_FIELDS, _NUMBERS, min_size=1, max_size=3))
def test_any_field_values_give_a_model_or_one_error(tmp_path: Path, fields: dict[str, Any]) -> None:
    """L8: no field values lead to a traceback."""
    folder = tmp_path / "model"
    if not folder.exists():
        make_checkpoint(folder)
        (folder / "config.json").rename(tmp_path / "good.json")
    good = json.loads((tmp_path / "good.json").read_text())
    (folder / "config.json").write_text(json.dumps(good | fields))
    try:
        load(folder, "auto", None, torch.device("cpu"))
    except SettingError as error:
        assert error.param in ("model", "max_model_len")


def test_entries_that_only_look_like_weight_files_are_ignored(tmp_path: Path) -> None:
    """L8: a folder or a dangling link named *.safetensors used to end the start with a traceback."""
    folder = make_checkpoint(tmp_path / "model")
    alone = load(folder, "auto", None, torch.device("cpu")).info
    (folder / "folder.safetensors").mkdir()
    (folder / "link.safetensors").symlink_to(tmp_path / "nothing")
    assert load(folder, "auto", None, torch.device("cpu")).info == alone


def test_an_impossible_model_length_allocates_no_table(tmp_path: Path) -> None:
    """L8: 2^31 - 1 positions used to allocate a table of 128 GiB here, of 2 TiB by default."""
    folder = make_checkpoint(tmp_path / "model")
    set_fields(max_position_embeddings=2**31 - 1)(folder)
    tracemalloc.start()
    try:
        driver = Driver(folder)
        driver.add("a", [3, 4, 5])
        answer = driver.generate(["a"], 4)
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES
    finally:
        tracemalloc.stop()
    short = Driver(make_checkpoint(tmp_path / "short"))
    short.add("a", [3, 4, 5])
    assert short.generate(["a"], 4) == answer
