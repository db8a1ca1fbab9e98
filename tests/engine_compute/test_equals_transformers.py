"""Greedy answers in float32 equal those of transformers, token by token, for any division of the work into steps."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import load_reference, make_checkpoint, reference_greedy
from tests.engine_compute.driver import Driver

NUM_TOKENS = 24
PROMPTS = {
    "one": [7],
    "short": [3, 1, 4, 1, 5],
    "block": list(range(40, 48)),
    "long": [(37 * i + 11) % 256 for i in range(61)],
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-sharded": ("llama", {"tie_word_embeddings": True, "max_shard_size": "60KB"}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 50000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    # Several of the prompts are longer than the original length.
    "qwen3-yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 6}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"max_shard_size": "60KB"}),
    "qwen2-window-tied": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied-sharded": ("qwen3", {"tie_word_embeddings": True, "max_shard_size": "60KB"}),
}


def expected(folder: Path) -> dict[str, list[int]]:
    model = load_reference(folder)
    return {name: reference_greedy(model, prompt, NUM_TOKENS) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_chunked_and_mixed_batches(tmp_path: Path, variant: str) -> None:
    """C15, A32: whole prompts, chunked prompts, and chunks beside decodes give the same answer."""
    family, overrides = VARIANTS[variant]
    folder = make_checkpoint(tmp_path / variant, family, seed=3, **overrides)
    answers = expected(folder)
    assert len({tuple(answer) for answer in answers.values()}) == len(PROMPTS)
    driver = Driver(folder)
    for way, chunk in {"whole": 1000, "chunked": 7, "tiny": 3}.items():
        for name, prompt in PROMPTS.items():
            driver.add(f"{name}/{way}", prompt)
        generated = driver.generate([f"{name}/{way}" for name in PROMPTS], NUM_TOKENS, chunk)
        assert generated == {f"{name}/{way}": answer for name, answer in answers.items()}
    driver.executor.shutdown()


def test_one_request_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", seed=5)
    driver = Driver(folder, block_size=16)
    driver.add("alone", PROMPTS["long"])
    reference = reference_greedy(load_reference(folder), PROMPTS["long"], NUM_TOKENS)
    assert driver.generate(["alone"], NUM_TOKENS)["alone"] == reference


def test_old_rope_fields_equal_the_new_ones(tmp_path: Path) -> None:
    """``rope_theta`` and ``rope_scaling`` of older checkpoints have the meaning of ``rope_parameters``."""
    family, overrides = VARIANTS["llama-llama3-rope"]
    folder = make_checkpoint(tmp_path, family, seed=3, **overrides)
    answers = expected(folder)
    config = folder / "config.json"
    text = config.read_text()
    assert '"rope_parameters"' in text
    config.write_text(text.replace('"rope_parameters"', '"rope_theta": 50000.0, "rope_scaling"'))
    driver = Driver(folder)
    driver.add("long", PROMPTS["long"])
    assert driver.generate(["long"], NUM_TOKENS)["long"] == answers["long"]


def test_copied_kv_continues_the_answer(tmp_path: Path) -> None:
    """Copied blocks and the tokens sampled elsewhere continue the answer unchanged (a hand-over by hand)."""
    folder = make_checkpoint(tmp_path, "qwen3", seed=4)
    sender, receiver = Driver(folder), Driver(folder)
    prompt = PROMPTS["long"]
    sender.add("a", prompt)
    sender.generate(["a"], 1, chunk=16)
    blocks = [block + 100 for block in sender.sequences["a"].blocks]
    for source, target in zip(sender.sequences["a"].blocks, blocks, strict=True):
        receiver.runner.memory.write_view(target)[:] = sender.runner.memory.read_view(source)
    receiver.runner.memory.commit(blocks)
    receiver.add(
        "a",
        sender.sequences["a"].tokens,
        num_prompt_tokens=len(prompt),
        num_computed=len(prompt),
        blocks=blocks,
    )
    reference = reference_greedy(load_reference(folder), prompt, NUM_TOKENS)
    assert receiver.generate(["a"], NUM_TOKENS)["a"] == reference
