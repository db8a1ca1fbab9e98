"""Decoders defined by transformers on the paged KV cache: their answers, and the errors for unsupported ones."""

import asyncio
import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from contract.errors import SettingError
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.attention.backend import LayerShape
from engine.client import InProcessClient
from engine.models.config import ModelShape
from engine.models.language_model import LanguageModel
from engine.models.loading import LoadedModel, load
from engine.models.paged_attention import AskedMask, LayerCall, Survey
from engine.models.self_check import Reference, difference, tolerance
from engine.models.transformers_loading import TransformersModel
from engine.settings import EngineSettings
from tests.checkpoints import (
    FOREIGN_FAMILIES,
    load_reference,
    make_foreign_checkpoint,
    reference_greedy,
    write_checkpoint,
)
from tests.engine_pair import outputs_of, running_pair, tokens_of
from tests.fakes.engine.local_ranks import Exchange, LocalRankGroup

NUM_TOKENS = 16
SHARED = [(37 * i + 11) % 256 for i in range(24)]
PROMPTS = [[7], [3, 1, 4, 1, 5], SHARED, [*SHARED, *range(60, 81)], [*SHARED, *range(90, 107)]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
CPU = torch.device("cpu")


def expected(folder: Path) -> list[list[int]]:
    model = load_reference(folder)
    return [reference_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("family", FOREIGN_FAMILIES)
async def test_an_engine_gives_the_answers_of_generate(tmp_path: Path, family: str) -> None:
    """Prompts in chunks beside decodes, with too few blocks for all at once; then again from the prefix cache."""
    folder = make_foreign_checkpoint(tmp_path, family, seed=3)
    answers = expected(folder)
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    shape = load_on_cpu(folder).config
    block_bytes = shape.num_layers * prod(shape.cache_shape(1, 4)) * 4
    # Layers with windows keep few blocks, so that less memory is too little.
    num_blocks = 30 if not any(shape.sliding_windows) else 18 if None in shape.sliding_windows else 12
    client = await InProcessClient.start(
        EngineSettings(
            model=folder,
            dtype="float32",
            block_size=4,
            max_num_batched_tokens=13,
            kv_cache_bytes=num_blocks * block_bytes,
        )
    )

    async def ask(name: str) -> list[list[int]]:
        requests = [
            EngineRequest(request_id=f"{name}-{index}", prompt_token_ids=prompt, sampling=GREEDY)
            for index, prompt in enumerate(PROMPTS)
        ]
        return list(
            map(tokens_of, await asyncio.gather(*(outputs_of(client, request) for request in requests)))
        )

    try:
        assert await ask("cold") == answers
        assert await ask("warm") == answers
        counters = await client.call("counters")
        # With windows alone, a request starts only when all that it ever keeps is free.
        assert counters["num_preemptions_total"] > 0 or None not in shape.sliding_windows
        assert counters["cached_tokens_total"] > 0
    finally:
        await client.shutdown()


async def test_a_hand_over_continues_the_answer(tmp_path: Path) -> None:
    folder = make_foreign_checkpoint(tmp_path, "gemma2", seed=3)
    answers = expected(folder)
    async with running_pair(folder, block_size=4, max_num_batched_tokens=16) as pair:
        for index, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
            assert tokens_of(*await pair.ask(f"r{index}", prompt, GREEDY)) == answer


def load_on_cpu(folder: Path, dtype: str = "float32", **arguments: Any) -> LoadedModel:
    return load(folder, dtype, arguments.pop("max_model_len", None), CPU, **arguments)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_half_precision(tmp_path: Path, family: str, dtype: str) -> None:
    folder = make_foreign_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    loaded = load_on_cpu(folder, dtype)
    assert loaded.info.dtype == dtype
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, dtype)}
    assert load_on_cpu(folder, "auto").info.dtype == "bfloat16"


def test_weights_that_need_no_conversion_stay_memory_mapped(tmp_path: Path) -> None:
    loaded = load_on_cpu(make_foreign_checkpoint(tmp_path, "olmo2"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [
        [int(end, 16) for end in line.split()[0].split("-")] for line in maps if line.endswith(".safetensors")
    ]
    for parameter in loaded.model.parameters():
        assert any(start <= parameter.data_ptr() < end for start, end in mapped)


def change_config(folder: Path, **fields: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def write(folder: Path, name: str, **fields: Any) -> Path:
    """Write a small random checkpoint of transformers' model of that name."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=264, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **fields
    )
    return write_checkpoint(folder, getattr(transformers, f"{name}ForCausalLM")(config), 0)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        (
            "Bloom",
            {"n_head": 4, "max_position_embeddings": 64},
            "its attention cannot run over the paged KV cache",
        ),
        ("Electra", {"max_position_embeddings": 64}, "attention to later tokens is not served"),
        ("DiffLlama", {"max_position_embeddings": 64}, "layers that attend more than once are not served"),
        ("RecurrentGemma", {"max_position_embeddings": 64}, "recurrent layers are not served"),
        (
            "DeepseekV32",
            {
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "intermediate_size": 32,
                "moe_intermediate_size": 32,
            },
            "sparse attention is not served",
        ),
    ],
)
def test_models_that_would_give_wrong_answers_are_rejected(
    tmp_path: Path, name: str, fields: dict[str, Any], reason: str
) -> None:
    folder = write(tmp_path, name, **fields)
    with pytest.raises(SettingError, match=f"{name}ForCausalLM is not served.*({reason})") as caught:
        load_on_cpu(folder)
    assert caught.value.param == "model"


def test_the_attention_of_a_model_decides_its_backend(tmp_path: Path) -> None:
    for family, special in (
        ("gpt_oss", "attention sinks"),
        ("llama4", "attention in chunks"),
        ("olmo2", None),
    ):
        loaded = load_on_cpu(make_foreign_checkpoint(tmp_path / family, family))
        assert loaded.model.special_attention == special


def test_a_window_or_chunk_that_only_the_mask_has_is_found() -> None:
    states = torch.zeros(2, 1, 4)

    def reaches(mask: object, **sizes: int) -> dict[int, dict[str, Any]]:
        survey = Survey("OurForCausalLM", **sizes)
        survey.attend(LayerCall(3, LayerShape(1.0, None), states, states, states, mask, {}))
        return survey.reaches

    window = AskedMask(sliding_window_causal_mask_function(5))
    chunk = AskedMask(chunked_causal_mask_function(6, torch.zeros(1, dtype=torch.int64)))
    assert reaches(window, window=5, chunk_size=6) == {3: {"sliding_window": 5}}
    assert reaches(chunk, window=5, chunk_size=6) == {3: {"chunk_size": 6}}
    assert reaches(AskedMask(causal_mask_function), window=5, chunk_size=6) == {}
    for mask, sizes in ((window, {"window": 6}), (chunk, {"chunk_size": 5}), (chunk, {"window": 6})):
        with pytest.raises(SettingError, match="a layer's mask is not the causal one"):
            reaches(mask, **sizes)


@pytest.mark.parametrize(("masked", "named"), [(5, 5), (5, 6), (5, None), (None, 5), (None, None)])
def test_the_mask_must_match_what_the_attention_declares(masked: int | None, named: int | None) -> None:
    """Only what the attention declares reaches the backend; windows are too long to be tested by running them."""
    mask = AskedMask(causal_mask_function if masked is None else sliding_window_causal_mask_function(masked))
    states = torch.zeros(2, 1, 4)
    call = LayerCall(0, LayerShape(1.0, named), states, states, states, mask, {})
    survey = Survey("OurForCausalLM")
    if masked == named:
        survey.attend(call)
        assert survey.result(1, 9, 7) == ModelShape(9, 1, 1, 4, 7, sliding_windows=(named,))
    else:
        with pytest.raises(SettingError, match=rf"OurForCausalLM is not served: .* \({named}\)"):
            survey.attend(call)


def test_unsupported_configurations_are_rejected(tmp_path: Path) -> None:
    folder = make_foreign_checkpoint(tmp_path, "olmo2")
    change_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(SettingError, match=r"quantization_config\.bits is None; only 4 or 8 is served"):
        load_on_cpu(folder)
    change_config(folder, quantization_config=None, model_type="phi")
    with pytest.raises(SettingError, match="its model_type 'phi' stands for another"):
        load_on_cpu(folder)
    change_config(folder, model_type="olmo2", architectures=["BertForCausalLM2"])
    with pytest.raises(
        SettingError,
        match=r"is 'BertForCausalLM2', which is not served; the served ones are Llama.*transformers",
    ):
        load_on_cpu(folder)


def test_code_in_the_model_folder_is_not_run(tmp_path: Path) -> None:
    folder = make_foreign_checkpoint(tmp_path, "olmo2")
    (folder / "own.py").write_text("raise SystemExit('this has been run')")
    change_config(folder, auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    assert type(load_on_cpu(folder).model) is TransformersModel


def test_errors_name_missing_and_unexpected_tensors(tmp_path: Path) -> None:
    folder = make_foreign_checkpoint(tmp_path, "olmo2")
    change_config(folder, num_hidden_layers=3)
    with pytest.raises(SettingError, match=r"11 tensors are missing: model\.layers\.2\.mlp"):
        load_on_cpu(folder)
    change_config(folder, num_hidden_layers=1)
    with pytest.raises(SettingError, match=r"11 tensors are unexpected: model\.layers\.1\.mlp"):
        load_on_cpu(folder)


def test_several_ranks_are_rejected(tmp_path: Path) -> None:
    folder = make_foreign_checkpoint(tmp_path, "olmo2")
    with pytest.raises(SettingError, match="tensor_parallel_size is 2; Olmo2ForCausalLM") as caught:
        load_on_cpu(folder, group=LocalRankGroup(0, Exchange(2)))
    assert caught.value.param == "tensor_parallel_size"


class Leaking(LanguageModel):
    """A model in which tokens are affected a little by their neighbours in the batch."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any) -> Tensor:
        states: Tensor = self.model(*arguments)
        return states + 0.01 * states.roll(1, dims=0)

    def logits(self, states: Tensor) -> Tensor:
        return self.model.logits(states)


def test_the_self_check_detects_leaks_between_requests(tmp_path: Path) -> None:
    loaded = load_on_cpu(make_foreign_checkpoint(tmp_path, "granite"))
    with torch.inference_mode():
        reference = Reference.of(load_reference(tmp_path), loaded.info.vocab_size, CPU)
        rest = (loaded.config, torch.float32, reference)
        allowed = tolerance(torch.float32)
        assert (
            difference(loaded.model, *rest)
            < allowed / 100
            < allowed
            < difference(Leaking(loaded.model), *rest)
        )


def test_bidirectional_attention_is_rejected(tmp_path: Path) -> None:
    folder = change_config(make_foreign_checkpoint(tmp_path, "olmo2"), is_causal=False)
    with pytest.raises(SettingError, match="Olmo2ForCausalLM is not served: attention to later tokens"):
        load_on_cpu(folder)


def test_logits_for_zero_rows(tmp_path: Path) -> None:
    loaded = load_on_cpu(make_foreign_checkpoint(tmp_path, "gemma2"))
    assert isinstance(loaded.model, TransformersModel)
    with torch.inference_mode():
        assert loaded.model.logits(torch.empty(0, 64)).shape == (0, loaded.info.vocab_size)
