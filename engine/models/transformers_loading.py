"""Load a checkpoint of another family as a model of transformers, if its answers are right.

A model that would give wrong answers is refused: first by its configuration, then by the attention that its layers require,
and last by comparing logits with transformers' own attention.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from contract.errors import KvbatonError, SettingError
from engine.models.config import ModelShape, RawConfig, unserved
from engine.models.load_progress import has_terminal
from engine.models.paged_attention import ASKING, AskedMask, Survey, attach, register
from engine.models.self_check import Reference, difference, tolerance
from engine.models.transformers_model import TransformersModel

logger = logging.getLogger(__name__)

_DECODERS = ("ForCausalLM", "LMHeadModel")
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_NAMES_SHOWN = 5


class TransformersCheckpoint:
    """A folder that transformers can read and whose configuration can be served.

    num_positions: the longest context in tokens. Raises SettingError.
    """

    def __init__(self, folder: Path, raw: RawConfig, architecture: str) -> None:
        self._folder = folder
        self._architecture = architecture
        if raw.get("quantization_config"):
            raise self._unserved(
                "its weights are quantised (quantization_config), which is served for built-in models only"
            )
        with self._refusing():
            self._config: Any = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(self._config.model_type) != architecture:
            raise self._unserved(f"its model_type {self._config.model_type!r} stands for another")
        if reason := _why_unserved(self._config):
            raise self._unserved(reason)
        num_positions = _num_positions(self._config)
        if num_positions is None:
            raise self._unserved("config.json does not give its number of positions")
        self.num_positions = num_positions

    def load(self, dtype: torch.dtype, device: torch.device) -> tuple[TransformersModel, ModelShape]:
        """Load the weights onto ``device`` and check the model. Raises SettingError."""
        register()
        with self._refusing():
            whole = self._read(dtype).to(device).requires_grad_(False)
            with torch.inference_mode():
                shape = self._survey(whole, device)
                reference = Reference.of(whole, shape.vocab_size, device)
                model = TransformersModel(whole).eval()
                found = difference(model, shape, dtype, reference)
        allowed = tolerance(dtype)
        logger.info(
            "self-check of %s: logits differ by %.1e, allowed is %.1e", self._architecture, found, allowed
        )
        if not found <= allowed:
            raise self._unserved(
                f"over the paged KV cache its logits differ by {found:.1e} of themselves from those that "
                f"transformers computes, and {allowed:.1e} is allowed"
            )
        return model, shape

    def _read(self, dtype: torch.dtype) -> Any:
        """Read the weights by memory map; those already in ``dtype`` stay backed by the file."""
        with _progress_bar_on_terminals_alone():
            read: Any = AutoModelForCausalLM.from_pretrained(
                self._folder,
                config=self._config,
                dtype=dtype,
                attn_implementation=ASKING,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        whole, report = read
        for what in ("missing_keys", "unexpected_keys"):
            if names := sorted(report[what]):
                shown = ", ".join(names[:_NAMES_SHOWN]) + (" and more" if len(names) > _NAMES_SHOWN else "")
                kind = what.removesuffix("_keys")
                raise SettingError(f"model: {len(names)} tensors are {kind}: {shown}", param="model")
        return whole

    def _survey(self, whole: Any, device: torch.device) -> ModelShape:
        survey = Survey(self._architecture)
        attach(whole, survey)
        output = whole(input_ids=torch.zeros((1, 2), dtype=torch.long, device=device), use_cache=False)
        return survey.result(self._config.num_hidden_layers, output.logits.shape[-1], self.num_positions)

    def _unserved(self, reason: str) -> SettingError:
        return unserved(self._architecture, reason)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn any error of transformers into the SettingError of a model that cannot be served."""
        try:
            yield
        except KvbatonError:
            raise
        except Exception as error:
            why = "transformers cannot run it so"
            if ASKING in str(error) or AskedMask.__name__ in str(error):
                why = "its attention is not behind transformers' attention interface"
            raise self._unserved(f"{why} ({type(error).__name__}: {error})") from error


def is_decoder(architecture: str) -> bool:
    """Return whether transformers has a causal language model of this name."""
    return architecture.endswith(_DECODERS) and architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _why_unserved(config: Any) -> str | None:
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "it has an encoder"
    if config.get_text_config() is not config:
        return "it takes more than text"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share KV (num_kv_shared_layers)"
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES):
        return f"it has layers of the type {unknown[0]!r}"
    return None


def _num_positions(config: Any) -> int | None:
    """Return the number of positions whose angles do not depend on the rest of the batch.

    "longrope" changes the angles of all tokens of a batch as soon as one token lies beyond the original positions.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    for parameters in _rope_parameters(config):
        original = parameters.get("original_max_position_embeddings")
        if limit and original and parameters.get("rope_type") == "longrope":
            limit = min(limit, int(original))
    return limit


def _rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    """Return the rope parameters: one mapping, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, Mapping)]
    return nested or [parameters]


@contextmanager
def _progress_bar_on_terminals_alone() -> Iterator[None]:
    progress: Any = transformers_logging
    was_on = progress.is_progress_bar_enabled()
    if not has_terminal():
        progress.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            progress.enable_progress_bar()
