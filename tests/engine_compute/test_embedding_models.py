"""Embedding models as they are published: the decoder alone, without a head, with the files of sentence-transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from contract.errors import InternalError, SettingError
from contract.layout import model_fingerprint
from contract.outputs import FinishReason
from contract.requests import EngineRequest, PoolingParams
from contract.sampling import SamplingParams
from engine.core import EngineCore
from engine.models.checkpoint import HEAD_NAME, Checkpoint
from engine.settings import EngineSettings
from tests.checkpoints import FAMILIES, make_checkpoint, write_modules
from tests.engine_compute.driver import Driver
from tests.engine_compute.test_checkpoint import change_config, load_on_cpu
from tests.engine_compute.test_pooling import PROMPT, embed
from tests.engine_parallel.driver import RanksDriver


def reference(folder: Path, kind: str) -> Any:
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(torch.tensor([PROMPT])).last_hidden_state[0].double().numpy()
    vector = states[-1] if kind == "last" else states.mean(axis=0)
    return vector / np.linalg.norm(vector)


def check_embeddings(folder: Path, driver: Driver) -> None:
    try:
        for pooling in (PoolingParams("last"), PoolingParams("mean")):
            exact = reference(folder, pooling.pooling_type or "")
            for chunk in (1000, 7):
                found = embed(driver, PROMPT, pooling, chunk)
                np.testing.assert_allclose(found, exact, rtol=2e-4, atol=2e-5)
    finally:
        driver.executor.shutdown()


@pytest.mark.parametrize("architecture", ["Model", "ForCausalLM"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_auto_model(tmp_path: Path, family: str, architecture: str) -> None:
    folder = make_checkpoint(tmp_path, family, seed=3, is_bare=True)
    assert "norm.weight" in load_file(folder / "model.safetensors")
    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    change_config(folder, architectures=[name.removesuffix("Model") + architecture])
    check_embeddings(folder, Driver(folder))


@pytest.mark.parametrize("options", [{"max_shard_size": "60KB"}, {"tie_word_embeddings": True}])
def test_sharded_and_tied_checkpoints(tmp_path: Path, options: dict[str, Any]) -> None:
    """A tied configuration creates no head from the embedding if the decoder was saved alone."""
    folder = make_checkpoint(tmp_path, "qwen3", is_bare=True, **options)
    assert not load_on_cpu(folder).info.has_head
    check_embeddings(folder, Driver(folder))


def test_on_two_ranks(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", is_bare=True)
    check_embeddings(folder, RanksDriver(folder))


def test_a_missing_head_is_allowed_only_in_sentence_transformers_models(
    tmp_path: Path,
) -> None:
    folder = make_checkpoint(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights[HEAD_NAME]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(SettingError, match=r"misses 1 tensors: lm_head\.weight"):
        load_on_cpu(folder)
    write_modules(folder)
    assert not load_on_cpu(folder).info.has_head


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_with_a_head_can_still_generate(tmp_path: Path, is_tied: bool) -> None:
    folder = make_checkpoint(tmp_path, tie_word_embeddings=is_tied)
    write_modules(folder)
    loaded = load_on_cpu(folder)
    assert loaded.info.has_head
    assert (loaded.model.lm_head is None) is is_tied


def test_errors_use_the_tensor_names_of_the_file(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, is_bare=True)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"norm.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(SettingError, match=r"model\.norm\.weight is \[2\]"):
        load_on_cpu(folder)
    save_file(weights | {"score.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(SettingError, match=r"unexpected 1 tensors: model\.score\.weight"):
        load_on_cpu(folder)


def test_bidirectional_attention_is_rejected(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", is_bare=True)
    change_config(folder, is_causal=False)
    with pytest.raises(SettingError, match="is_causal is false"):
        load_on_cpu(folder)


def test_custom_model_code_is_rejected_unless_its_attention_is_causal(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", is_bare=True)
    change_config(folder, auto_map={"AutoModel": "modeling.Qwen2Model"})
    with pytest.raises(SettingError, match="auto_map names code of the model's own"):
        load_on_cpu(folder)
    change_config(folder, is_causal=True)
    assert not load_on_cpu(folder).info.has_head


def test_generation_is_rejected(tmp_path: Path) -> None:
    """An engine rejects such a request and continues; the model itself computes no logits."""
    folder = make_checkpoint(tmp_path, is_bare=True)
    with pytest.raises(InternalError, match="no output head"):
        load_on_cpu(folder).model.logits(torch.ones(1, 64))
    core = EngineCore(EngineSettings(model=folder, block_size=4, kv_cache_bytes=1 << 20, max_num_seqs=4))
    try:
        assert not core.info.has_head
        sampling = SamplingParams(temperature=0.0, max_tokens=2)
        core.add_request(EngineRequest(request_id="answer", prompt_token_ids=PROMPT, sampling=sampling))
        embedding = EngineRequest(
            request_id="embedding",
            prompt_token_ids=PROMPT,
            sampling=sampling,
            pooling_params=PoolingParams("last"),
        )
        core.add_request(embedding)
        outputs_by_id = {output.request_id: output for outputs in core.step().values() for output in outputs}
    finally:
        core.close()
    assert outputs_by_id["answer"].finish_reason is FinishReason.ERROR
    assert outputs_by_id["answer"].error_param == "model"
    assert "embeddings only" in (outputs_by_id["answer"].error_message or "")
    np.testing.assert_allclose(
        outputs_by_id["embedding"].pooled or [], reference(folder, "last"), rtol=2e-4, atol=2e-5
    )


def test_pooling_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """Each setting gives another fingerprint; without pooling it is the same as before pooling was part of it."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    found = [model_fingerprint(tmp_path, "float32")]
    for mode, further in (("lasttoken", ()), ("mean_tokens", ()), ("mean_tokens", ("Normalize",))):
        write_modules(tmp_path, mode, *further)
        found.append(model_fingerprint(tmp_path, "float32"))
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text("{}")
    found.append(model_fingerprint(tmp_path, "float32"))
    assert found[0] == "d1c974c7ab9cebd9aa774989e899b1b2@float32"
    assert len(set(found)) == 5


def test_names_with_and_without_the_prefix_are_equivalent(tmp_path: Path) -> None:
    bare = Checkpoint(make_checkpoint(tmp_path / "bare", is_bare=True))
    whole = Checkpoint(make_checkpoint(tmp_path / "whole"))
    assert (bare.is_bare, whole.is_bare) == (True, False)
    assert bare.names() == whole.names() - {HEAD_NAME}
    assert all(torch.equal(bare.tensor(name), whole.tensor(name)) for name in bare.names())
