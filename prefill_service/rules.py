"""The rules of the prefill role, and how a model pools hidden states into embeddings (``pooling_of``)."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from msgspec.structs import replace

from contract.errors import SettingError, UnsupportedFieldError
from contract.membership import Credit
from contract.model_folder import read_json as read_json_value
from contract.requests import EngineRequest, PoolingParams, PoolingType
from engine.info import EngineInfo
from protos import worker_pb2 as pb
from text.tokenizer import read_json
from wire.legs import embed_from_proto, prefill_from_proto
from worker.role_rules import LegCall, ReadLeg, cache_credit
from worker.settings import WorkerSettings

_MODULES = "modules.json"
_SERVED_MODULES = ("Transformer", "Pooling", "Normalize")
_FILE = Path("1_Pooling") / "config.json"
_MODE = "pooling_mode"
_SERVED: dict[str, PoolingType] = {
    "lasttoken": "last",
    "mean_tokens": "mean",
    "mean": "mean",
    "max_tokens": "max",
    "max": "max",
}
_QUEUED_STEPS = 2
"""Steps full of prompt tokens that a prefill worker accepts in advance, so that it never waits for the router."""


async def read_prefill(leg: pb.PrefillRequest, _: Path) -> EngineRequest:
    """Return the request that computes a prompt and lends its KV. Raises InvalidRequestError for a bad order."""
    return prefill_from_proto(leg)


async def read_embed(leg: pb.EmbedLegRequest, model_folder: Path) -> EngineRequest:
    """Return the request that pools a prompt's hidden states as the order, or else the model's folder, asks.

    Raises InvalidRequestError for a bad order, UnsupportedFieldError for pooling that is not supported.
    """
    request = embed_from_proto(leg)
    assert request.pooling_params is not None
    # Files are read in a thread: a slow disk must not hold up the tokens of the worker's other requests.
    pooling = await asyncio.to_thread(pooling_of, model_folder, request.pooling_params)
    return replace(request, pooling_params=pooling)


class PrefillRules:
    """Fulfils ``RoleRules``: this role computes prompts, and decodes none."""

    calls: Mapping[LegCall, ReadLeg] = MappingProxyType(
        {LegCall.PREFILL: read_prefill, LegCall.EMBED: read_embed}
    )

    def credit(self, settings: WorkerSettings, info: EngineInfo) -> Credit:
        """See RoleRules. The queue of prompt tokens limits it: a longer one would only wait here, and not at the router.

        There the tokens that wait can still be given to another worker.
        """
        queued = settings.max_queued_tokens or _QUEUED_STEPS * settings.max_num_batched_tokens
        full = cache_credit(settings, info)
        return replace(full, max_tokens=min(queued, full.max_tokens))

    def has_mixed_kv(self, *, num_leases: int, num_fetches: int) -> bool:
        """See RoleRules. This role lends, so that a fetch is left from the former one."""
        return num_fetches > 0


def pooling_of(folder: Path, requested: PoolingParams) -> PoolingParams:
    """Return ``requested`` with a type: its own, else the one of ``1_Pooling/config.json``, else the last token's state.

    The model's own normalization (``2_Normalize``) is not read: that of ``requested`` counts. Raises UnsupportedFieldError
    for another kind of pooling or several at once in the folder, where it is read, and for further modules after it.
    """
    _check_modules(folder)
    if requested.pooling_type is not None:
        return requested
    try:
        config = read_json(folder / _FILE)
    except (SettingError, ValueError) as error:
        raise UnsupportedFieldError(f"the model's {_FILE} cannot be read: {error}", param="model") from error
    # One flag per mode, or (newer) a list in one field.
    if named := config.get(_MODE):
        modes = [str(name) for name in (named if isinstance(named, list) else [named])]
    else:
        flags = f"{_MODE}_"
        modes = [
            name.removeprefix(flags) for name, value in config.items() if name.startswith(flags) and value
        ]
    if not modes:
        return replace(requested, pooling_type="last")
    if len(modes) > 1 or modes[0] not in _SERVED:
        raise UnsupportedFieldError(
            f"the model's {_FILE} asks for pooling by {' and '.join(modes)}; this version supports "
            f"{' or '.join(_SERVED)}; name a pooling_type to pool in another way",
            param="model",
        )
    return replace(requested, pooling_type=_SERVED[modes[0]])


def _check_modules(folder: Path) -> None:
    """Raise UnsupportedFieldError for a module that would change the vector, as ``2_Dense`` does."""
    try:
        modules = read_json_value(folder / _MODULES)
        names = [str(module["type"]).rpartition(".")[2] for module in modules or ()]
    except (SettingError, TypeError, LookupError) as error:
        raise UnsupportedFieldError(
            f"the model's {_MODULES} cannot be read: {error!r}", param="model"
        ) from error
    if unknown := [name for name in names if name not in _SERVED_MODULES]:
        raise UnsupportedFieldError(
            f"the model's {_MODULES} asks for {unknown[0]}; this version supports {', '.join(_SERVED_MODULES)}",
            param="model",
        )
