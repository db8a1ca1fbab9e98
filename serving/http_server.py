"""The one way in which our processes listen for HTTP."""

from dataclasses import dataclass

from aiohttp import web

from contract.errors import SettingError
from serving.settings import split_address


@dataclass(frozen=True)
class HttpServer:
    """A listening aiohttp application; ``address`` is the real "host:port"."""

    address: str
    runner: web.AppRunner

    async def close(self) -> None:
        """Stop listening, end open connections, run the application's clean-up."""
        await self.runner.cleanup()


async def start_http(
    app: web.Application,
    address: str,
    *,
    param: str = "http",
    handler_cancellation: bool = True,
    shutdown_timeout_seconds: float = 5.0,
) -> HttpServer:
    """Listen on ``address`` (port 0 picks a free one).

    handler_cancellation: a client that goes away cancels its handler; aiohttp's runners differ in their default, so
    it is always said. Raises SettingError, which names the setting ``param``, when the address cannot be bound.
    """
    host, port = split_address(address)
    runner = web.AppRunner(
        app,
        handler_cancellation=handler_cancellation,
        shutdown_timeout=shutdown_timeout_seconds,
        access_log=None,
    )
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise SettingError(
            f"{param} is {address}: cannot listen there, {error.strerror or error}", param=param
        ) from error
    bound_port = runner.addresses[0][1]
    return HttpServer(f"{host}:{bound_port}", runner)
