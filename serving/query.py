"""Values in the query of a URL."""

from math import isfinite

from aiohttp import web

from contract.errors import InvalidRequestError
from contract.options import MAX_SECONDS


def seconds_in(request: web.Request, name: str) -> float | None:
    """Return a time in the query, or None if it is not there. Raises InvalidRequestError for another text than seconds."""
    text = request.query.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise InvalidRequestError(
            f"{name} is {text[:40]!r}; give seconds, at least 0, at most {MAX_SECONDS}", param=name
        )
    return seconds
