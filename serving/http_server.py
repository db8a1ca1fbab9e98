"""The one way in which our processes listen for HTTP."""

import logging
import ssl
from dataclasses import dataclass

from aiohttp import http_exceptions, web

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
    tls: ssl.SSLContext | None = None,
) -> HttpServer:
    """Listen on ``address`` (port 0 picks a free one).

    handler_cancellation: a client that goes away cancels its handler; aiohttp's runners differ in their default, so
    it is always said. tls: speak HTTPS. Raises SettingError, which names the setting ``param``, when the address cannot
    be bound.
    """
    host, port = split_address(address)
    runner = web.AppRunner(
        app,
        handler_cancellation=handler_cancellation,
        shutdown_timeout=shutdown_timeout_seconds,
        access_log=None,
        logger=_logger(),
    )
    await runner.setup()
    site = web.TCPSite(runner, host, port, ssl_context=tls)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise SettingError(
            f"{param} is {address}: cannot listen there, {error.strerror or error}", param=param
        ) from error
    bound_port = runner.addresses[0][1]
    return HttpServer(f"{host}:{bound_port}", runner)


def _logger() -> logging.Logger:
    logger = logging.getLogger(f"{__name__}.aiohttp")
    logger.addFilter(_without_client_bytes)  # a filter is added once, however often it is asked for
    return logger


def _without_client_bytes(record: logging.LogRecord) -> bool:
    """What is no HTTP is told without what the client wrote: it may hold an API key."""
    if record.exc_info and isinstance(record.exc_info[1], http_exceptions.HttpProcessingError):
        record.msg, record.exc_info = f"{record.msg}: {type(record.exc_info[1]).__name__}", None
    return True
