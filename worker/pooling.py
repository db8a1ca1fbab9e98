"""The pooling of a model's hidden states into embeddings, from its sentence-transformers configuration."""

from pathlib import Path
from typing import Any, Literal

from contract.errors import SettingError, UnsupportedFieldError
from contract.model_folder import read_json as read_json_value
from contract.requests import PoolingParams
from text.tokenizer import read_json

_MODULES = "modules.json"
_SERVED_MODULES = ("Transformer", "Pooling", "Normalize")
_FILE = Path("1_Pooling") / "config.json"
_MODE = "pooling_mode"
_SERVED: dict[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}


def pooling_of(folder: Path) -> PoolingParams:
    """Return the model's pooling: the last token's state, or the mean if ``1_Pooling/config.json`` asks for it.

    The vector is normalized to length 1 with or without ``2_Normalize``. Raises UnsupportedFieldError for another kind of
    pooling, for several at once, and for further modules after it.
    """
    _check_modules(folder)
    try:
        modes = _modes(read_json(folder / _FILE))
    except (SettingError, ValueError) as error:
        raise UnsupportedFieldError(f"the model's {_FILE} cannot be read: {error}", param="model") from error
    if not modes:
        return PoolingParams()
    if len(modes) > 1 or modes[0] not in _SERVED:
        raise UnsupportedFieldError(
            f"the model's {_FILE} asks for pooling by {' and '.join(modes)}; this version supports "
            f"{' or '.join(_SERVED)}",
            param="model",
        )
    return PoolingParams(kind=_SERVED[modes[0]])


def _modes(config: dict[str, Any]) -> list[str]:
    """Return the names of the pooling modes: one flag per mode, or (newer) a list in one field."""
    if named := config.get(_MODE):
        return [str(name) for name in (named if isinstance(named, list) else [named])]
    flags = f"{_MODE}_"
    return [name.removeprefix(flags) for name, value in config.items() if name.startswith(flags) and value]


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
