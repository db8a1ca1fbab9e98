"""One forward pass of a loaded model, by the fastest implementation for this machine."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from contract.layout import LATENT
from engine.attention.backend import Needs, choose_backend, create_backend, is_installed
from engine.compute.best_tokens import BestSearch, TorchBestTokens, TritonBestTokens, best_of_ranks
from engine.compute.forward_graphs import GraphedForward, capture_sizes
from engine.compute.forward_plain import PlainForward
from engine.compute.inputs import PreparedInputs
from engine.compute.piecewise import piece_sizes
from engine.compute.recording import CudaRecorder, Recorder
from engine.connector import LayerWatch
from engine.kernels.binding import load_kernels
from engine.kernels.decoder import KernelDecoder, KernelDraw, why_unserved
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM
from engine.models.language_model import LanguageModel
from engine.models.linear import LinearOp
from engine.models.loading import LoadedModel
from engine.sampling.sampler import Draw, Sampling, draw_by_torch
from engine.settings import EngineSettings

logger = logging.getLogger(__name__)
_LARGE_VOCABULARY = 8192


class ForwardPass(Protocol):
    """The implementation that a rank computes with. ``close`` it.

    draw: samples tokens at random from its logits. serves_groups: layers may have block tables of their own
    (``PreparedInputs.others``).
    """

    draw: Draw
    serves_groups: bool

    @property
    def runs_ahead(self) -> bool:
        """True if a pass may begin before the results of the one before are read, with ``PreparedInputs.fed``."""

    def begin(
        self,
        inputs: PreparedInputs,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
        *,
        may_be_interrupted: bool = False,
    ) -> Callable[[], Tensor | None]:
        """Begin a forward pass. Call the returned function, which waits, before any other method of this object.

        It returns the final hidden states ``[num_tokens, hidden_size]``, equal on all ranks and valid until the next call,
        or None if the pass was interrupted.

        caches: per layer ``[num_blocks, parts, num_kv_heads, block_size, head_dim]``; None keeps nothing. watch: called for
        every layer whose KV is written. may_be_interrupted: the caller can do without the states, and with KV
        that is partly written: the same tokens are computed again.
        """

    def interrupt(self) -> None:
        """End the running pass now, if it may be interrupted; from any thread. A pass may ignore this."""

    def logits(self, states: Tensor) -> Tensor:
        """Map hidden states ``[num_rows, hidden_size]`` to this rank's logits; see LanguageModel."""

    def best_tokens(self, logits: Tensor) -> Sampling | None:
        """Return the best token of each row of the last ``logits``, on all ranks, the lowest id among equals.

        None if they are not computed yet, or a row is known to have a value that is not a number.
        """

    def reserve(self, caches: Sequence[Tensor]) -> None:
        """Take the memory that steps take beside weights and KV, before the pool's size is chosen.

        caches: those of a pool that has only the null block.
        """

    def capture(self, caches: Sequence[Tensor]) -> None:
        """Prepare for steps on these caches; called once, after they are allocated."""

    def close(self) -> None:
        """End its threads."""


MakeForward = Callable[[LoadedModel, EngineSettings, torch.device], ForwardPass]


def forward_pass(loaded: LoadedModel, settings: EngineSettings, device: torch.device) -> ForwardPass:
    """Choose the kernels if they can compute this model here, else torch, with CUDA graphs if possible; log it.

    Raises SettingError if the attention backend that was set explicitly cannot compute it.
    """
    model = loaded.model
    config = loaded.config
    info = loaded.info
    needs = Needs(
        info.dtype,
        config.head_dim,
        kv_dtype=info.kv_dtype,
        is_latent=config.kv_parts == LATENT,
        special=model.special_attention,
    )
    # A model of transformers shows only when it runs whether it has groups or windows.
    if isinstance(config, DecoderConfig):
        group = config.num_heads // config.num_kv_heads
        needs = replace(needs, group=group, windows=frozenset(config.sliding_windows))
    name = choose_backend(settings.attention_backend, device, needs)
    backend = create_backend(name)
    draw = draw_on_cuda(settings.attention_backend) if device.type == "cuda" else draw_by_torch
    if isinstance(model, CausalLM) and isinstance(config, DecoderConfig):
        if device.type == "cuda":
            if config.experts is not None:
                logger.info("no fused operations and no CUDA graphs: the model has experts")
                return PlainForward(model, backend, settings.block_size, device, draw)
            plain = PlainForward(fused(model, config, name), backend, settings.block_size, device, draw)
            return with_graphs(plain, loaded, settings, CudaRecorder(device))
        if (decoder := _by_kernels(loaded, model, config, settings, device)) is not None:
            return decoder
    # The kernels draw even if torch computes the model, where they are faster: from large vocabularies, on the host.
    may_take_kernels = device.type != "cuda" and settings.attention_backend == "auto"
    if may_take_kernels and info.vocab_size >= _LARGE_VOCABULARY:
        kernels = load_kernels()
        draw = draw if kernels is None else KernelDraw(kernels)
    return PlainForward(model, backend, settings.block_size, device, draw)


def fused(model: CausalLM, config: DecoderConfig, attention_backend: str) -> LanguageModel:
    """Return fused operations for the model beside this attention if Triton is installed, else its modules."""
    if attention_backend == "torch":
        return model
    from engine.fused.decoder import FusedDecoder

    return FusedDecoder(model, config)


def with_graphs(
    plain: PlainForward, loaded: LoadedModel, settings: EngineSettings, recorder: Recorder
) -> ForwardPass:
    """Return what replays the steps that the settings name, and computes all others as ``plain`` does."""
    if settings.enforce_eager or settings.cudagraph_mode == "none":
        logger.info(
            "no CUDA graphs: %s",
            "enforce_eager is set" if settings.enforce_eager else "cudagraph_mode is none",
        )
        return plain
    has_pieces = settings.cudagraph_mode == "full_and_piecewise"
    return GraphedForward(
        plain,
        recorder,
        sizes=capture_sizes(settings.max_num_seqs),
        max_model_len=loaded.info.max_model_len,
        piece_sizes=piece_sizes(settings.max_num_batched_tokens) if has_pieces else (),
        has_head=loaded.info.has_head,
        find_best=best_of_ranks(loaded.group, loaded.info.vocab_size, best_tokens_on_cuda()),
    )


def best_tokens_on_cuda() -> BestSearch:
    """Return the search by Triton if it is installed."""
    return TritonBestTokens() if is_installed("triton") else TorchBestTokens()


def draw_on_cuda(attention_backend: str) -> Draw:
    """Return sampling by Triton if it is installed, except beside plain torch's attention: the reference."""
    if attention_backend == "torch" or not is_installed("triton"):
        return draw_by_torch
    from engine.sampling.triton_draw import draw_by_triton

    return draw_by_triton


def _by_kernels(
    loaded: LoadedModel,
    model: CausalLM,
    config: DecoderConfig,
    settings: EngineSettings,
    device: torch.device,
) -> KernelDecoder | None:
    reason = why_unserved(config, loaded.info.dtype, device, settings.tensor_parallel_size)
    if settings.attention_backend != "auto":
        reason = f"attention_backend is {settings.attention_backend}"
    if reason is None and loaded.info.kv_dtype != loaded.info.dtype:
        reason = f"they read KV in {loaded.info.dtype}, and kv_cache_dtype is {loaded.info.kv_dtype}"
    forms = {layer.form for layer in model.modules() if isinstance(layer, LinearOp) and layer.matrix is None}
    if forms:  # such layers can only be called, and the kernels call nothing
        reason = f"its weights are multiplied as {' and '.join(sorted(forms))}"
    if reason is not None:
        logger.info("plain torch computes the model, not the kernels: %s", reason)
        return None
    kernels = load_kernels()
    if kernels is None:
        return None
    logger.info("the kernels compute the model, with %d threads", settings.num_threads)
    torch.set_num_threads(1)  # the kernels have their own threads
    return KernelDecoder(
        model,
        config,
        kernels,
        num_threads=settings.num_threads,
        cores=settings.cores,
        block_size=settings.block_size,
        max_length=loaded.info.max_model_len,
    )
