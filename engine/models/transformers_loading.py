"""Load a checkpoint of another family as a model of transformers, if its answers are right.

A model that would give wrong answers is refused: first by its configuration, then by the attention that its layers require,
and last by comparing logits with transformers' own attention.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from contract.errors import SettingError
from engine.models.config import ModelShape, RawConfig, unserved
from engine.models.load_progress import has_terminal
from engine.models.paged_attention import ASKING, AskedMask, Survey, attach, register
from engine.models.self_check import Reference, difference, tolerance
from engine.models.transformers_model import TransformersModel
from engine.models.transformers_rules import read_facts, refusing

logger = logging.getLogger(__name__)

_NAMES_SHOWN = 5


class TransformersCheckpoint:
    """A folder that transformers can read and whose configuration can be served.

    num_positions: the longest context in tokens. Raises SettingError.
    """

    def __init__(self, folder: Path, raw: RawConfig, architecture: str) -> None:
        self._folder = folder
        self._architecture = architecture
        facts = read_facts(folder, raw)
        self._config = facts.config
        self.num_positions = facts.num_positions

    def load(self, dtype: torch.dtype, device: torch.device) -> tuple[TransformersModel, ModelShape]:
        """Load the weights onto ``device`` and check the model. Raises SettingError."""
        register()
        with refusing(self._architecture, ASKING, AskedMask.__name__):
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
