"""The Python API of kvbaton: ``from kvbaton import LLM, Engine, SamplingParams``.

Importing it loads neither torch nor a model; the names below load their modules at first use.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contract.requests import PoolingParams
    from kvbaton.async_llm import AsyncLLM
    from kvbaton.engine import Engine
    from kvbaton.llm import LLM
    from kvbaton.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
    )
    from kvbaton.sampling import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

__version__ = version("kvbaton")
_MODULES = {
    "LLM": "kvbaton.llm",
    "AsyncLLM": "kvbaton.async_llm",
    "CompletionOutput": "kvbaton.outputs",
    "EmbeddingOutput": "kvbaton.outputs",
    "EmbeddingRequestOutput": "kvbaton.outputs",
    "Engine": "kvbaton.engine",
    "Logprob": "kvbaton.outputs",
    "PoolingParams": "contract.requests",
    "RequestOutput": "kvbaton.outputs",
    "SamplingParams": "kvbaton.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'kvbaton' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
