"""The latency split as a response header that browsers and proxies can show (W3C Server Timing)."""

from aiohttp import web

from router.answers.answer import Delta

_PARTS = (
    *("queue", "intake", "placement", "worker", "engine_queue", "messages"),
    *("prefill", "transfer", "first_decode_step", "decode", "end_to_end"),
)


def server_timing(request: web.Request, deltas: list[Delta]) -> dict[str, str]:
    """Return ``Server-Timing`` in milliseconds for the slowest answer, if ``x-kvbaton-timings: true`` asks for it."""
    if request.headers.get("x-kvbaton-timings", "").lower() not in ("true", "1"):
        return {}
    timings = [delta.timings.as_dict() for delta in deltas if delta.timings]
    longest = max(timings, key=lambda one: float(one["end_to_end"]), default=None)
    if longest is None:
        return {}
    return {"Server-Timing": ", ".join(f"{part};dur={longest[part] * 1000:.3f}" for part in _PARTS)}
