"""``Expect: 100-continue``: a client that asks before it sends its body.

aiohttp answers before the middlewares run, so that a body which is rejected anyway would be sent first. Here the reader
of the body sends the answer.
"""

from aiohttp import hdrs, web


async def check_expectation(request: web.Request) -> None:
    """Raise HTTPExpectationFailed for any other expectation."""
    if request.version >= (1, 1) and not _asks(request):
        raise web.HTTPExpectationFailed(text=f"Unknown Expect: {request.headers.get(hdrs.EXPECT, '')[:40]}")


async def let_body_come(request: web.Request) -> None:
    """Let a client that asked send its body. Call it once, before the first byte is read."""
    if request.version >= (1, 1) and _asks(request):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # aiohttp takes a writer that has sent something for a response that has begun
        request.writer.output_size = 0


def _asks(request: web.Request) -> bool:
    return request.headers.get(hdrs.EXPECT, "").lower() == "100-continue"
