"""Models that take images or sounds, too: their text is served, and gives the tokens of the whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import SettingError
from engine.models.loading import load
from engine.models.served import examine
from tests.checkpoints import EOS_ID, reference_greedy, write_checkpoint
from tests.engine_compute.driver import Driver
from tests.families.tiny_models import make_tiny

# Llama 4's rotation of images has complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values")
PROMPTS = [[7], [3, 1, 4, 1, 5], [(37 * i + 11) % 256 for i in range(45)]]
COMPOSITES = ("gemma3", "llama4", "mistral3", "qwen3_vl")
NUM_TOKENS = 12


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("family", COMPOSITES)
def test_its_text_gives_the_tokens_of_the_whole(tmp_path: Path, family: str) -> None:
    whole = make_tiny(family)
    write_checkpoint(tmp_path, whole, 3)
    answers = {
        str(index): reference_greedy(whole, prompt, NUM_TOKENS) for index, prompt in enumerate(PROMPTS)
    }
    assert len({tuple(answer) for answer in answers.values()}) == len(PROMPTS)
    driver = Driver(tmp_path, dtype="float32")
    for index, prompt in enumerate(PROMPTS):
        driver.add(str(index), prompt)
    assert driver.generate(list(answers), NUM_TOKENS, 7) == answers
    driver.executor.shutdown()


@pytest.mark.parametrize("family", COMPOSITES)
def test_the_parts_for_images_have_no_memory(tmp_path: Path, family: str) -> None:
    whole = make_tiny(family)
    write_checkpoint(tmp_path, whole, 3)
    served = examine(tmp_path)
    assert served.is_text_of_more
    assert served.is_tried
    loaded = load(tmp_path, "float32", None, torch.device("cpu"))
    left = [name for name, _ in loaded.model.named_parameters()]
    assert not [name for name in left if "vision" in name or "visual" in name or "projector" in name]
    numbers = sum(parameter.numel() for parameter in loaded.model.parameters())
    assert numbers < sum(parameter.numel() for parameter in whole.parameters())
    assert served.num_weight_bytes == 4 * numbers
    assert served.kv_bytes_per_token is not None
    layout = loaded.config
    assert served.kv_bytes_per_token == 2 * 4 * layout.num_layers * layout.num_kv_heads * layout.head_dim
    assert EOS_ID in loaded.info.eos_token_ids


def test_the_class_is_found_by_the_model_type(tmp_path: Path) -> None:
    """Publishers spell names otherwise than transformers."""
    write_checkpoint(tmp_path, make_tiny("qwen3_vl"), 3)
    change_config(tmp_path, architectures=["Qwen3_VLForConditionalGeneration"])
    assert examine(tmp_path).architecture == "Qwen3_VLForConditionalGeneration"
    assert load(tmp_path, "float32", None, torch.device("cpu")).config.num_layers == 4


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("minimax", {}, "recurrent layers are not served"),
        (
            "qwen3_vl",
            {"architectures": ["Qwen9VLForConditionalGeneration"]},
            "which is not served; the served ones are",
        ),
        (
            "qwen3_vl",
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "its model_type 'qwen3_vl' stands for another",
        ),
        ("qwen3_vl", {"architectures": ["Qwen3VLModel"]}, "which is not served; the served ones are"),
        ("mllama", {}, "layers that attend to images are not served"),
        ("blip-2", {}, "it answers no text without an image"),
        (
            "fast_vlm",
            {"vision_config": {"model_type": "timm_wrapper", "architecture": "fastvit_mci3"}},
            "its part for images needs timm",
        ),
    ],
)
def test_another_text_is_refused_in_the_words_of_the_loader(
    tmp_path: Path, family: str, fields: dict[str, Any], reason: str
) -> None:
    write_checkpoint(tmp_path, make_tiny(family), 3)
    change_config(tmp_path, **fields)
    refusals = []
    for read in (lambda: examine(tmp_path), lambda: load(tmp_path, "float32", None, torch.device("cpu"))):
        with pytest.raises(SettingError, match=reason) as caught:
            read()
        refusals.append(caught.value.message)
    assert refusals[0] == refusals[1]
