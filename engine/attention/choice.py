"""Choose the attention backend by device, number format and installed packages."""

import logging
from collections.abc import Callable
from importlib.util import find_spec

import torch

from contract.errors import SettingError

logger = logging.getLogger(__name__)

_FLASHINFER_DTYPES = ("bfloat16", "float16")
_FLASHINFER_HEAD_DIMS = (64, 128, 256)


def is_installed(package: str) -> bool:
    """Return whether Python finds the package, without importing it."""
    return find_spec(package) is not None


def choose_backend(
    setting: str,
    device: torch.device,
    dtype: str,
    head_dim: int,
    installed: Callable[[str], bool] = is_installed,
) -> str:
    """Return the name of the backend; log it, with the reasons against faster ones.

    auto: plain torch on the CPU; on CUDA FlashInfer if it can compute the model, else Triton. Raises SettingError for a
    backend that was set explicitly and cannot compute the model here.
    """
    reasons = {
        "flashinfer": _why_not_flashinfer(device, dtype, head_dim, installed),
        "triton": _why_not_on(device, "triton", installed),
        "torch": None,
    }
    if setting != "auto":
        if (reason := reasons[setting]) is not None:
            raise SettingError(f"attention_backend is {setting!r}, but {reason}", param="attention_backend")
        return setting
    chosen = next(name for name, reason in reasons.items() if reason is None)
    if device.type == "cuda":
        passed = "; ".join(f"not {name}: {reason}" for name, reason in reasons.items() if reason is not None)
        logger.info("attention by %s%s", chosen, f" ({passed})" if passed else "")
        if chosen == "torch":
            logger.warning("attention by plain torch is slow on CUDA, and its steps cannot be captured")
    return chosen


def _why_not_flashinfer(
    device: torch.device, dtype: str, head_dim: int, installed: Callable[[str], bool]
) -> str | None:
    if (reason := _why_not_on(device, "flashinfer", installed)) is not None:
        return reason
    if not installed("triton"):
        return "it stores KV by a Triton kernel, and triton is not installed"
    if dtype not in _FLASHINFER_DTYPES:
        return f"it computes {' and '.join(_FLASHINFER_DTYPES)}, and this is {dtype}"
    if head_dim not in _FLASHINFER_HEAD_DIMS:
        return f"it takes head dims of {', '.join(map(str, _FLASHINFER_HEAD_DIMS))}, and this is {head_dim}"
    return None


def _why_not_on(device: torch.device, package: str, installed: Callable[[str], bool]) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is {device.type}"
    return None if installed(package) else f"{package} is not installed"
