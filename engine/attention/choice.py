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


@cache
def why_flashinfer_fails(device: torch.device, needs: Needs) -> str | None:
    """Try FlashInfer out on tiny batches, once for each model's needs; return why it cannot be used, or None.

    Its kernels are loaded or compiled here. A machine may have the package and neither the kernels nor a compiler.
    """
    try:
        import_module("engine.attention.flashinfer_backend").try_out(device, needs)
    except Exception as error:  # noqa: BLE001 - the boundary to a library that compiles: whatever it raises
        return f"it does not work here: {_first_line(error)}"
    return None


def choose_backend(
    setting: str,
    device: torch.device,
    needs: Needs,
    installed: Callable[[str], bool] = is_installed,
    why_flashinfer_fails: Callable[[torch.device, Needs], str | None] = why_flashinfer_fails,
) -> str:
    """Return the name of the backend; log it, with the reasons against faster ones.

    auto: plain torch on the CPU; on CUDA FlashInfer if it can compute the model, else Triton. Raises SettingError for a
    backend that was set explicitly and cannot compute the model here.
    """
    reasons: dict[str, Callable[[], str | None]] = {
        "flashinfer": lambda: (
            _why_not_flashinfer(device, needs, installed) or why_flashinfer_fails(device, needs)
        ),
        "triton": lambda: _why_not_on(device, "triton", installed),
        "torch": lambda: None,
    }
    if setting != "auto":
        if (reason := reasons[setting]()) is not None:
            raise SettingError(f"attention_backend is {setting!r}, but {reason}", param="attention_backend")
        return setting
    passed = []
    for name, why_not in reasons.items():
        if (reason := why_not()) is None:
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
