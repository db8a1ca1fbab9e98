"""The interface between models and attention kernels (plan a step once, attend in every layer), and the choice of a backend.

It is chosen by device, the model's needs and installed packages.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from contract.errors import SettingError
from engine.compute.inputs import PreparedInputs

logger = logging.getLogger(__name__)
BACKENDS = {
    "flashinfer": ("engine.attention.flashinfer_backend", "FlashInferBackend"),
    "hybrid": ("engine.attention.hybrid_backend", "HybridBackend"),
    "torch": ("engine.attention.torch_backend", "TorchBackend"),
    "triton": ("engine.attention.triton_backend", "TritonBackend"),
}
_FLASHINFER_DTYPES = ("bfloat16", "float16")
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
# The names that ``auto`` chooses from, fastest first.
_AUTO = ("hybrid", "triton", "torch")
_MAX_REASON = 300


@dataclass(frozen=True)
class LayerShape:
    """The parameters that differ between layers: the scores' scale and the window, in tokens (None: all).

    softcap: scores become softcap × tanh(score / softcap) after scaling (Gemma 2); None applies none. chunk_size: a token
    sees the tokens of its own chunk of positions only (Llama 4); None: of all. sinks ``[num_heads]``: a further score of
    each head, of which the softmax has no value (gpt-oss); None: none. Plain torch alone computes the last two.
    """

    scale: float
    sliding_window: int | None
    softcap: float | None = None
    chunk_size: int | None = None
    sinks: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Slots:
    """The places of the KV of a step's tokens, int32 ``[num_tokens]``, on the device.

    places: slots of the pool (-1: none). num_cleared: slots to zero behind each, as the torch backend clears a fresh block.
    """

    places: Tensor
    num_cleared: Tensor


StoreKV = Callable[[Tensor, Tensor, Tensor, Slots], None]
"""Stores keys and values in a layer's part of the pool, as ``AttentionStep.store``, in slots at fixed addresses."""


class AttentionStep(Protocol):
    """The attention of one forward pass, valid for that pass only."""

    @property
    def slots(self) -> Slots | None:
        """The slots for a kernel that stores the KV which it computes, in place of ``store``; None: only ``store`` can."""

    def store(self, key: Tensor, value: Tensor, cache: Tensor) -> None:
        """Write the tokens' keys and values, ``[num_tokens, num_kv_heads, head_dim]``, into a layer's part of the pool.

        cache: a view of that part, ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``. Of a latent, which is key and
        value at once, it has one part, and the keys alone are written.
        """

    def attend(
        self, shape: LayerShape, query: Tensor, key: Tensor | None, value: Tensor | None, cache: Tensor | None
    ) -> Tensor:
        """Attend over all tokens that each token may see; ``cache`` already holds them.

        query ``[num_tokens, num_heads, head_dim]``; key, value and cache as in ``store``. Without a cache (the profile
        run) the tokens of a request see only each other; only then key and value are read. Returns the query's shape.
        """


@dataclass(frozen=True)
class GroupedStep:
    """The steps of layers of which some have block tables of their own.

    others: the steps of these layers. first: that of all other layers.
    """

    first: AttentionStep
    others: Mapping[int, AttentionStep]


Steps = AttentionStep | GroupedStep


def step_of(steps: Steps, layer: int) -> AttentionStep:
    """Return the step by which a layer attends."""
    return steps.others.get(layer, steps.first) if isinstance(steps, GroupedStep) else steps


class PlannedStep(AttentionStep, Protocol):
    """A step with any number of tokens of each request."""

    def attend(
        self,
        shape: LayerShape,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: Tensor | None,
        output: Tensor | None = None,
    ) -> Tensor:
        """See AttentionStep. output: receives the result, and is contiguous, as the query then is; None: a new tensor."""


class StaticDecode(AttentionStep, Protocol):
    """A step with tensors at fixed addresses, so that a graph of it can be captured and replayed for other requests."""

    def refill(self, inputs: PreparedInputs) -> bool:
        """Load another step. Unused rows see only the null block, and store nothing.

        Only one static step of a backend is loaded at a time. Return False for a step that it has no room for.
        """


class AttentionBackend(Protocol):
    """One way to compute attention."""

    def plan(self, inputs: PreparedInputs, block_size: int, device: torch.device) -> PlannedStep:
        """Move the tensors that all layers share to the device, once per step."""

    def plan_static(
        self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> StaticDecode | None:
        """Plan steps of exactly ``num_reqs`` requests with one token each; None if the backend has no static steps.

        max_blocks: the columns of the block table. The caller requests the largest number first.
        """

    def static_store(self) -> StoreKV | None:
        """Return what stores KV in captured steps of any lengths; None if the backend has no static steps."""


def create_backend(name: str) -> AttentionBackend:
    """Make the backend of this name. Raises SettingError that lists the known ones."""
    if name not in BACKENDS:
        raise SettingError(f"attention backend {name!r} is unknown; choose one of {', '.join(BACKENDS)}")
    module, attribute = BACKENDS[name]
    return cast(Callable[[], AttentionBackend], getattr(import_module(module), attribute))()


@dataclass(frozen=True)
class Needs:
    """The attention of a model. group: query heads per KV head. windows: those of its layers, in tokens (None: all).

    kv_dtype: of the cache; None: ``dtype``. is_latent: a token has one row in the cache, which is key and value. special:
    what plain torch alone computes, in words; None: nothing.
    """

    dtype: str
    head_dim: int
    group: int = 1
    windows: frozenset[int | None] = frozenset({None})
    kv_dtype: str | None = None
    is_latent: bool = False
    special: str | None = None


def is_installed(package: str) -> bool:
    """Return whether Python finds the package, without importing it."""
    return find_spec(package) is not None


WhyItFails = Callable[[torch.device, Needs, bool], str | None]
"""See ``why_flashinfer_fails``."""


@cache
def why_flashinfer_fails(device: torch.device, needs: Needs, has_decodes: bool) -> str | None:
    """Try FlashInfer out on tiny batches, once for each model's needs; return why it cannot be used, or None.

    Its kernels are loaded or compiled here. A machine may have the package and neither the kernels nor a compiler.
    has_decodes: it is to compute decodes as well, so their kernel is needed too.
    """
    try:
        import_module("engine.attention.flashinfer_backend").try_out(device, needs, has_decodes)
    except Exception as error:  # noqa: BLE001 - the boundary to a library that compiles: whatever it raises
        line = next(iter(str(error).strip().splitlines()), "")
        return "it does not work here: " + f"{type(error).__name__}: {line}"[:_MAX_REASON]
    return None


def choose_backend(
    setting: str,
    device: torch.device,
    needs: Needs,
    installed: Callable[[str], bool] = is_installed,
    why_flashinfer_fails: WhyItFails = why_flashinfer_fails,
) -> str:
    """Return the name of the backend; log it, with the reasons against faster ones.

    auto: plain torch on the CPU; on CUDA hybrid (FlashInfer for steps with chunks, Triton for decodes) if FlashInfer can
    compute the model, else Triton. Raises SettingError for a backend that was set explicitly and cannot compute the model
    here.
    """

    def why_not_flashinfer(has_decodes: bool) -> str | None:
        reason = _why_not_flashinfer(device, needs, installed)
        return reason or why_flashinfer_fails(device, needs, has_decodes)

    reasons: dict[str, Callable[[], str | None]] = {
        "hybrid": lambda: why_not_flashinfer(False),
        "flashinfer": lambda: why_not_flashinfer(True),
        "triton": lambda: _why_not_on(device, "triton", installed) or _why_not_from(needs),
        "torch": lambda: None,
    }
    if setting != "auto":
        if (reason := reasons[setting]()) is not None:
            raise SettingError(f"attention_backend is {setting!r}, but {reason}", param="attention_backend")
        return setting
    passed = []
    for name in _AUTO:
        if (reason := reasons[name]()) is None:
            break
        passed.append(f"not {name}: {reason}")
    if device.type == "cuda":
        logger.info("attention by %s%s", name, f" ({'; '.join(passed)})" if passed else "")
        if name == "torch":
            logger.warning("attention by plain torch is slow on CUDA, and its steps cannot be captured")
    return name


def _why_not_flashinfer(device: torch.device, needs: Needs, installed: Callable[[str], bool]) -> str | None:
    if (reason := _why_not_on(device, "flashinfer", installed)) is not None:
        return reason
    if not installed("triton"):
        return "it stores KV by a Triton kernel, and triton is not installed"
    if needs.dtype not in _FLASHINFER_DTYPES:
        return f"it computes {' and '.join(_FLASHINFER_DTYPES)}, and this is {needs.dtype}"
    if needs.head_dim not in _FLASHINFER_HEAD_DIMS:
        dims = ", ".join(map(str, _FLASHINFER_HEAD_DIMS))
        return f"it takes head dims of {dims}, and this is {needs.head_dim}"
    return _why_not_from(needs)


def _why_not_from(needs: Needs) -> str | None:
    """Return why kernels that multiply what they load, and convert nothing, cannot compute this attention."""
    if needs.special is not None:
        return f"it does not compute {needs.special}"
    if needs.is_latent:
        return "it reads a key and a value of each token, and this cache has one latent row"
    if needs.kv_dtype in (None, needs.dtype):
        return None
    return f"it reads KV in {needs.dtype}, and kv_cache_dtype is {needs.kv_dtype}"


def _why_not_on(device: torch.device, package: str, installed: Callable[[str], bool]) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is {device.type}"
    return None if installed(package) else f"{package} is not installed"
