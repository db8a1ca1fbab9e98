"""Supported model configurations, and the errors for all others."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from contract.errors import SettingError
from engine.models.decoder import inverse_frequencies
from engine.models.registry import find_architecture

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + index / 10 for index in range(8)],
    "long_factor": [2.0 + index for index in range(8)],
}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config_of(family: str = "Llama", **fields: Any) -> Any:
    return read_config({"architectures": [f"{family}ForCausalLM"], **fields})


def read_config(fields: dict[str, Any]) -> Any:
    raw = {**BASE, **fields}
    architecture = find_architecture(raw)
    assert architecture is not None
    return architecture.read_config(raw)


def test_defaults_are_those_of_transformers() -> None:
    llama = config_of()
    assert (llama.num_kv_heads, llama.head_dim, llama.rms_norm_eps) == (4, 16, 1e-6)
    assert (llama.rope.rope_type, llama.rope.theta) == ("default", 10000.0)
    assert not llama.tie_word_embeddings
    assert config_of("Qwen3").head_dim == transformers.Qwen3Config().head_dim
    assert config_of("Mistral").sliding_windows == (transformers.MistralConfig().sliding_window,) * 3


def test_variations_of_the_families() -> None:
    assert config_of("Qwen2").qkv_bias
    assert not config_of("Qwen2").output_bias
    assert config_of("Qwen3").qk_norm
    assert config_of("Llama", attention_bias=True).output_bias
    assert not config_of("Mistral", attention_bias=True).qkv_bias
    assert config_of("Mistral", sliding_window=None).sliding_windows == (None, None, None)
    windows = {"use_sliding_window": True, "sliding_window": 7}
    assert config_of("Qwen2", **windows, max_window_layers=2).sliding_windows == (None, None, 7)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config_of("Qwen3", **windows, layer_types=types).sliding_windows == (7, None, 7)
    assert config_of("Qwen3", sliding_window=7, layer_types=types).sliding_windows == (None, None, None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor must be a list of 8"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "must be below high_freq_factor"),
        ({"rope_scaling": [1]}, "must be an object"),
    ],
)
def test_unsupported_fields_are_rejected_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        read_config(fields)
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": ["full_attention"]}, "each of the 3 layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1"),
    ],
)
def test_qwen_layer_types_are_checked(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        config_of("Qwen2", **fields)


@pytest.mark.parametrize(
    ("parameters", "length"),
    [
        ({"rope_type": "linear", "factor": 3.0, "rope_theta": 20000.0}, 0),
        ({**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 500000.0}, 0),
        ({**LLAMA3, "rope_theta": 500000.0}, 0),
        (YARN, 0),
        ({**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}, 0),
        ({**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, 0),
        ({**YARN, "attention_factor": 1.7}, 0),
        (LONGROPE, 32),
        (LONGROPE, 33),
        ({**LONGROPE, "attention_factor": 1.2}, 33),
        (DYNAMIC, 128),
        (DYNAMIC, 200),
    ],
)
def test_frequencies_equal_those_of_transformers(parameters: dict[str, Any], length: int) -> None:
    """Equal bit by bit; a llama3 configuration without an original length uses the model's positions."""
    theirs = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=128, rope_parameters=dict(parameters)
    )
    expected, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, seq_len=length)
    rope = replace(config_of(rope_parameters=parameters).rope, length=length)
    assert torch.equal(inverse_frequencies(rope, 16), expected)
    assert rope.attention_factor == scaling


def test_angles_that_our_decoder_lacks_are_left_to_transformers() -> None:
    for fields in (
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "proportional"}},
    ):
        assert find_architecture({**BASE, **fields}) is None
        # A model of embeddings has no other path.
        model = find_architecture({**BASE, "architectures": ["LlamaModel"], **fields})
        assert model is not None
        with pytest.raises(SettingError, match="not served"):
            model.read_config({**BASE, **fields})


@pytest.mark.parametrize(
    ("parameters", "without_setting", "longest"),
    [
        (YARN, 128, 128),
        ({**YARN, "factor": 8.0}, 128, 256),
        (DYNAMIC, 128, 384),
        (LONGROPE, 32, 128),
        (LLAMA3, 128, 128),
    ],
)
def test_the_longest_context(parameters: dict[str, Any], without_setting: int, longest: int) -> None:
    assert config_of(rope_parameters=parameters).rope.lengths(128) == (without_setting, longest)


def test_only_angles_that_depend_on_the_context_have_a_name() -> None:
    ropes = [config_of(rope_parameters=each).rope for each in (YARN, LONGROPE, DYNAMIC)]
    assert [rope.angles(32) for rope in ropes] == ["", "", ""]
    assert [rope.angles(129) for rope in ropes] == ["", "+long-rope", "+rope-of-129"]
