"""What ``/health`` and ``/ready`` answer, on every port that has them."""

from aiohttp import web


def health_response(missing: str | None) -> web.Response:
    """200 where nothing is missing, else 503 and what it is."""
    status = {"status": "unavailable", "reason": missing} if missing else {"status": "ok"}
    return web.json_response(status, status=503 if missing else 200)
