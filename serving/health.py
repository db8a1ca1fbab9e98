"""The answer of ``/health`` and ``/ready``, on every port that has them."""

from aiohttp import web


def health_response(missing: str | None, degraded: str | None = None) -> web.Response:
    """Return 200 if nothing is missing, else 503 with the reason. degraded: why it serves worse than it should."""
    if missing:
        return web.json_response({"status": "unavailable", "reason": missing}, status=503)
    return web.json_response({"status": "degraded", "reason": degraded} if degraded else {"status": "ok"})
