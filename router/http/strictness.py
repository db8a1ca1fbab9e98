"""Fields that change nothing: those that are known and ignored, and those that nobody knows (``strict_api``)."""

from collections.abc import Callable
from typing import Any

from contract.errors import InvalidRequestError
from router.http.body import Body, Json
from serving.settings_file import nearest


def _texts(body: Body, name: str) -> None:
    for key, value in body.object(name).fields.items():
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name} holds {key[:20]!r}, which is no string", param=name)


_IGNORED: dict[str, Callable[[Body, str], Any]] = {
    "user": Body.string,
    "safety_identifier": Body.string,
    "prompt_cache_key": Body.string,
    "metadata": _texts,
    "service_tier": Body.string,
    "store": Body.flag,
    "prompt_cache_retention": Body.string,
    "client_metadata": Body.object,
    "prediction": Body.object,
}


def check_ignored(body: Body) -> None:
    """Raise InvalidRequestError for a field that is ignored, and of a wrong type."""
    for name, read in _IGNORED.items():
        read(body, name)


def refuse_unknown(fields: dict[str, Any], schema: Json, where: str = "") -> None:
    """Raise InvalidRequestError that names the fields which ``schema`` has not, in objects within too."""
    known = schema.get("properties")
    if known is None:
        return
    if unknown := [name for name in fields if name not in known]:
        named = ", ".join(f"'{where}{name[:60]}'" for name in unknown[:5])
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise InvalidRequestError(
            f"Unknown parameter: {named}{more}{nearest(unknown[0], known)}",
            param=f"{where}{unknown[0][:60]}",
            code="unknown_parameter",
        )
    for name, value in fields.items():
        if isinstance(value, dict):
            refuse_unknown(value, known[name], f"{where}{name}.")
