"""The answer of ``/health`` and ``/ready``, on every port that has them."""

from aiohttp import web


def health_response(missing: str | None) -> web.Response:
    """Return 200 if nothing is missing, else 503 with the reason."""
    status = {"status": "unavailable", "reason": missing} if missing else {"status": "ok"}
    return web.json_response(status, status=503 if missing else 200)
