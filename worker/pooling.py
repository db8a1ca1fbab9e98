"""How a model's prompts are pooled into embeddings: what its sentence-transformers configuration says."""

from pathlib import Path
from typing import Literal

from contract.errors import SettingError, UnsupportedFieldError
from contract.requests import PoolingParams
from text.tokenizer import read_json

_FILE = Path("1_Pooling") / "config.json"
_MODE = "pooling_mode_"
_SERVED: dict[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean_tokens": "mean"}


def pooling_of(folder: Path) -> PoolingParams:
    """The last token's state, unless the folder's ``1_Pooling/config.json`` asks for the mean.

    Raises UnsupportedFieldError where it asks for another kind, or for several at once.
    """
    try:
        config = read_json(folder / _FILE)
    except (SettingError, ValueError) as error:
        raise UnsupportedFieldError(f"the model's {_FILE} cannot be read: {error}", param="model") from error
    modes = [name.removeprefix(_MODE) for name, value in config.items() if name.startswith(_MODE) and value]
    if not modes:
        return PoolingParams()
    if len(modes) > 1 or modes[0] not in _SERVED:
        raise UnsupportedFieldError(
            f"the model's {_FILE} asks for pooling by {' and '.join(modes)}; this version pools by "
            f"{' or by '.join(_SERVED)}",
            param="model",
        )
    return PoolingParams(kind=_SERVED[modes[0]])
