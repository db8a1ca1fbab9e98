"""The check of ``strict_api``: every field of a body must be one that its schema describes."""

from typing import Any

from contract.errors import InvalidRequestError
from router.http.bodies.body import Json
from serving.settings_file import nearest


def reject_unknown(fields: dict[str, Any], schema: Json, where: str = "") -> None:
    """Raise InvalidRequestError that names the fields which ``schema`` does not describe, also in inner objects."""
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
            reject_unknown(value, known[name], f"{where}{name}.")
