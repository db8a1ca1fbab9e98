"""Choose the attention backend by device, the model's needs and installed packages."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from contract.errors import SettingError

logger = logging.getLogger(__name__)

_FLASHINFER_DTYPES = ("bfloat16", "float16")
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_AUTO = ("hybrid", "triton", "torch")
"""The names that ``auto`` chooses from, fastest first."""
_MAX_REASON = 300


@dataclass(frozen=True)
class Needs:
    """The attention of a model. group: query heads per KV head. windows: those of its layers, in tokens (None: all)."""

    dtype: str
    head_dim: int
    group: int = 1
    windows: frozenset[int | None] = frozenset({None})


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
        return f"it does not work here: {_first_line(error)}"
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
        "triton": lambda: _why_not_on(device, "triton", installed),
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
    return None


def _why_not_on(device: torch.device, package: str, installed: Callable[[str], bool]) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is {device.type}"
    return None if installed(package) else f"{package} is not installed"


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"[:_MAX_REASON]
