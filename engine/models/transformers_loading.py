"""Load a checkpoint of another family as a model of transformers on the paged KV cache, if its answers are right.

A model that would give wrong answers is refused: first by its configuration, then by the attention that its layers require,
and last by ``engine.models.self_check``.
"""

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging
from transformers.utils.generic import ModelOutput

from contract.errors import SettingError
from engine.attention.backend import Steps
from engine.connector import LayerWatch
from engine.models.attention_methods import choose_attention
from engine.models.checkpoint import Weights
from engine.models.config import ModelShape, RawConfig, check_spread, unserved
from engine.models.experts import TokenExchange
from engine.models.language_model import LanguageModel
from engine.models.latent_attention import find_latent
from engine.models.load_progress import has_terminal
from engine.models.paged_attention import (
    ASKING,
    SERVING,
    AskedMask,
    PagedAttention,
    Survey,
    attach,
    register,
    remove_temperatures,
)
from engine.models.recurrent_layers import RecurrentLayers
from engine.models.self_check import Reference, difference, tolerance
from engine.models.spread_experts import spread
from engine.models.transformers_rules import angles, read_facts, refusing

logger = logging.getLogger(__name__)

_NAMES_SHOWN = 5
_CHANGING_ANGLES = ("longrope", "dynamic")


class TransformersModel(LanguageModel):
    """A causal language model of transformers, split into the decoder and the layers that compute logits.

    Takes ownership of ``whole``. survey: of its layers. is_composite: it takes more than text. The layers behind the
    decoder (a head, scales, soft caps) run through the model's own ``forward``, in which a module that returns the
    decoder's states replaces the decoder.
    """

    def __init__(
        self, whole: Any, survey: Survey, recurrent: RecurrentLayers, is_composite: bool = False
    ) -> None:
        super().__init__()
        self._is_composite = is_composite
        self._attention = PagedAttention(survey.reaches, remove_temperatures(whole), survey.places)
        if recurrent.layout is not None:
            self.recurrent = recurrent
        self.special_attention = survey.special_attention
        attach(whole, self._attention)
        choose_attention(whole, SERVING)
        for module in list(whole.modules()):
            if (latent := find_latent(module)) is not None:
                module.kv_b_proj = latent
        self.decoder = _decoder_of(whole)
        self._given = _GivenStates(self.decoder)
        place = next(name for name, module in whole.named_modules() if module is self.decoder)
        whole.set_submodule(place, self._given)
        self.tail = whole
        # Gemma 4 would look tokens up by their embeddings.
        self._has_inputs_of_layers = "per_layer_inputs" in inspect.signature(whole.forward).parameters

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: Steps,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """See LanguageModel."""
        with self._attention.during(step, caches, watch, positions):
            output = self.decoder(
                input_ids=input_ids[None].long(), position_ids=positions[None].long(), use_cache=False
            )
        self._given.kind = type(output)
        states: Tensor = output.last_hidden_state[0]
        return states

    def logits(self, states: Tensor) -> Tensor:
        """See LanguageModel."""
        self._given.states = states[None]
        unread: dict[str, Tensor] = {"inputs_embeds": states[None]}
        if self._is_composite and self._has_inputs_of_layers:
            unread["per_layer_inputs"] = states[None]
        if not self._is_composite:  # a composite would look the tokens up, in the decoder that is replaced
            unread = {"input_ids": torch.zeros((1, len(states)), dtype=torch.long, device=states.device)}
        logits: Tensor = self.tail(**unread, use_cache=False).logits[0]
        self._given.states = None
        return logits.to(states.dtype)


class _GivenStates(nn.Module):
    """A replacement for the decoder that returns given states. kind: the class of the decoder's output.

    The numbers of the decoder, such as a factor of the logits, are attributes of this module as well.
    """

    states: Tensor | None = None
    kind: type[ModelOutput] = ModelOutput

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        # In a tuple: as a part it would have all weights twice.
        self._replaced = (decoder,)

    def __getattr__(self, name: str) -> Any:
        """Return what the model reads from its decoder, as the tokens of images that Chameleon never answers with."""
        return getattr(self._replaced[0], name)

    def forward(self, *_: object, **__: object) -> ModelOutput:
        """Return ``states`` for any input."""
        return self.kind(last_hidden_state=self.states)


class TransformersCheckpoint:
    """A folder that transformers can read and whose configuration can be served.

    num_ranks: data-parallel ones, over which its experts are spread. num_positions, max_positions: see
    ``TransformersFacts``. Raises SettingError.
    """

    def __init__(self, folder: Path, raw: RawConfig, architecture: str, num_ranks: int = 1) -> None:
        self._folder = folder
        self._architecture = architecture
        facts = read_facts(folder, raw)
        check_spread(facts.num_experts, num_ranks)
        self._facts = facts
        self.num_positions = facts.num_positions
        self.max_positions = facts.max_positions

    def angles(self, length: int) -> str:
        """Return the name of the angles of contexts of ``length`` tokens, for the model's fingerprint."""
        return angles(self._facts.text, length)

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        length: int,
        dequantised: Weights | None = None,
        exchange: TokenExchange | None = None,
    ) -> tuple[TransformersModel, ModelShape]:
        """Load the weights onto ``device`` and check the model. length: its longest context.

        dequantised: the weights, if transformers must not read the files itself. exchange: the ranks over which the experts
        are spread; all of them load at the same time. Raises SettingError.
        """
        register()
        with refusing(self._architecture, ASKING, AskedMask.__name__):
            whole = self._read(dtype, dequantised)
            text = self._facts.text
            if self._facts.is_composite:
                _keep_text(whole)
            whole = whole.to(device).requires_grad_(False)
            _fix_angles(whole, length)
            with torch.inference_mode():
                survey = Survey(
                    self._architecture,
                    getattr(text, "attention_chunk_size", None),
                    getattr(text, "sliding_window", None),
                )
                tokens = torch.zeros((1, 2), dtype=torch.long, device=device)
                vocab_size = whole(input_ids=tokens, use_cache=False).logits.shape[-1]
                attach(whole, survey)
                choose_attention(whole, ASKING)
                recurrent = RecurrentLayers(whole)
                with recurrent.survey():
                    # The decoder alone, as in each step: masks of a whole may depend on its images.
                    _decoder_of(whole)(input_ids=tokens, use_cache=False)
                shape = survey.result(text.num_hidden_layers, vocab_size, self.max_positions, recurrent)
                # Before ``TransformersModel`` takes the decoder out of ``whole``.
                reference = Reference.of(whole, shape.vocab_size, device)
                if exchange is not None:
                    spread(whole, exchange, self._architecture)
                model = TransformersModel(whole, survey, recurrent, self._facts.is_composite).eval()
                found = difference(model, shape, dtype, reference)
        allowed = tolerance(dtype)
        logger.info(
            "self-check of %s: logits differ by %.1e, allowed is %.1e", self._architecture, found, allowed
        )
        if not found <= allowed:  # also for nan
            raise unserved(
                self._architecture,
                f"over the paged KV cache its logits differ by {found:.1e} of themselves from those that "
                f"transformers computes, and {allowed:.1e} is allowed",
            )
        return model, shape

    def _read(self, dtype: torch.dtype, weights: Weights | None) -> Any:
        """Read the weights by memory map; those already in ``dtype`` stay backed by the file."""
        source: dict[str, Any] = {"pretrained_model_name_or_path": self._folder}
        if weights is not None:
            # transformers would look for a library of the format, and without its configuration reads plain weights.
            for config in (self._facts.config, self._facts.text):
                vars(config).pop("quantization_config", None)
            source = {"pretrained_model_name_or_path": None, "state_dict": self._unread(weights)}
        with _progress_bar_on_terminals_alone():
            read: Any = getattr(transformers, self._facts.class_name).from_pretrained(
                **source,
                config=self._facts.config,
                dtype=dtype,
                attn_implementation="eager",  # the parts for images refuse other names
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

    def _unread(self, weights: Weights) -> "dict[str, _Unread]":
        """Return the tensors by their names in the file, without biases that only the quantisation has added."""
        names = weights.names()
        if spare := {name for name in names if weights.is_spare(name)}:
            with torch.device("meta"):
                model = getattr(transformers, self._facts.class_name)(self._facts.config)
            # By the last two parts alone: the names of a file may differ from those of the model.
            kept = {_last_parts(name) for name, _ in model.named_parameters()}
            names -= {name for name in spare if _last_parts(name) not in kept}
        prefix = "model." if weights.is_bare else ""  # ``Checkpoint`` has added it
        return {name.removeprefix(prefix): _Unread(weights, name) for name in names}


class _Unread:
    """A tensor that is dequantised when transformers reads it, in the way in which it reads a slice of a file."""

    def __init__(self, weights: Weights, name: str) -> None:
        self._weights = weights
        self._name = name

    def __getitem__(self, index: object) -> Tensor:
        """Return the tensor. index: ``...``, all of it."""
        return self._weights.tensor(self._name)


def _last_parts(name: str) -> tuple[str, ...]:
    """Return the names of a layer and of its parameter."""
    return tuple(name.split(".")[-2:])


def _decoder_of(whole: Any) -> nn.Module:
    """Return the part that maps tokens to states; that of Llama 4 is found as a model with a head.

    ModernBERT's decoder calls its head so.
    """
    decoder: Any = whole.get_decoder()
    if isinstance(decoder, nn.Linear):
        decoder = whole.base_model
    found: nn.Module = decoder.model if hasattr(decoder, "lm_head") else decoder
    return found


def _keep_text(whole: Any) -> None:
    """Remove the parts of a composite that only images and sounds pass through: they need no memory."""
    kept = {*_decoder_of(whole).modules(), *whole.get_output_embeddings().modules()}
    # Their parents, which call them.
    on_the_way = [name for name, module in whole.named_modules() if not kept.isdisjoint(module.modules())]
    for parent in on_the_way:
        for name, module in list(whole.get_submodule(parent).named_children()):
            if kept.isdisjoint(module.modules()):
                setattr(whole.get_submodule(parent), name, nn.Identity())


def _fix_angles(whole: nn.Module, length: int) -> None:
    """Choose the angles that depend on the longest context once: KV that is stored must keep its meaning.

    transformers chooses them in each step, by the longest context in the batch.
    """
    rotary: Any
    for rotary in whole.modules():
        types: Any = getattr(rotary, "rope_type", None)
        if isinstance(types, str) and types in _CHANGING_ANGLES:
            frequencies, rotary.attention_scaling = ROPE_INIT_FUNCTIONS[types](
                rotary.config, rotary.inv_freq.device, seq_len=length
            )
            rotary.inv_freq = frequencies
            rotary.rope_type = "default"
        for layers, kind in list(types.items()) if isinstance(types, dict) else ():
            if kind in _CHANGING_ANGLES:
                device = getattr(rotary, f"{layers}_inv_freq").device
                frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
                    rotary.config, device, seq_len=length, layer_type=layers
                )
                setattr(rotary, f"{layers}_inv_freq", frequencies)
                setattr(rotary, f"{layers}_attention_scaling", scaling)
                types[layers] = "default"


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
