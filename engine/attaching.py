"""The client of an engine that another process has started, and shares (``engine.hosting.sharing``)."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Self

from contract.decoding import DECODING_ERRORS
from contract.errors import UnavailableError
from engine.client import StreamingClient
from engine.hosting.messages import FromEngine, Ready, Shutdown, Stopped, ToEngine
from engine.hosting.process import LAST_MESSAGES_SECONDS, ClientSockets
from engine.hosting.sharing import DOOR, MAX_UNREAD


class AttachedLink:
    """An ``EngineLink`` to an engine that runs already.

    connection: to the engine's socket; its end is that of the engine, or of this client.
    """

    def __init__(self, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self._connection, self._writer = connection
        self._sockets = ClientSockets(max_unread=MAX_UNREAD)
        self._has_ended_as_asked = False

    def start(self, receive: Callable[[FromEngine], None]) -> None:
        """Ask the engine to connect; see EngineLink."""
        self._reader = asyncio.get_running_loop().create_task(self._read(receive))
        self._writer.write(f"{self._sockets.folder}\n".encode())

    def send(self, message: ToEngine) -> None:
        """Send a message, or leave the engine instead of ending it; see EngineLink."""
        if isinstance(message, Shutdown):
            self.abandon()
        else:
            self._sockets.send(message)

    def abandon(self) -> None:
        """Leave the engine, which then aborts the requests of this client."""
        self._has_ended_as_asked = True
        self._writer.close()

    @property
    def complaint(self) -> str | None:
        """See EngineLink. The client that started the engine watches it."""
        return None

    async def wait_ended(self) -> bool:
        """Wait until this client has left, or the engine has ended; see EngineLink."""
        try:
            with contextlib.suppress(OSError):
                await self._connection.read()  # nothing comes but the end
            if not self._has_ended_as_asked:
                # Its last messages may still lie in the socket.
                await asyncio.wait({self._reader}, timeout=LAST_MESSAGES_SECONDS)
        finally:
            self._reader.cancel()
            self._writer.close()
            self._sockets.close()
        return self._has_ended_as_asked

    async def _read(self, receive: Callable[[FromEngine], None]) -> None:
        """Receive messages until the engine's last one, or one that cannot be read, at which this client leaves."""
        while True:
            try:
                message = await self._sockets.receive()
            except DECODING_ERRORS as error:
                receive(
                    Stopped(
                        f"a message cannot be read; both processes need the same version of kvbaton: {error}"
                    )
                )
                self._writer.close()
                return
            if isinstance(message, Ready):
                await self._sockets.wait_connected()
            receive(message)
            if isinstance(message, Stopped):
                self._has_ended_as_asked = message.error is None
                return


class AttachedClient(StreamingClient):
    """A further client of an engine, in any process of the user who started it. It has the outputs of its own requests only.

    ``shutdown`` leaves the engine, and aborts these requests. Of the calls it may use those that only read; ``until_free``
    waits for the requests of all clients. Its requests cannot be handed over.
    """

    ended = "this client has left, or the engine was shut down"
    lost = "the engine has died, or this client has lost it by not reading its messages"

    @classmethod
    async def attach(cls, address: str) -> Self:
        """Attach to an engine. address: what ``StreamingClient.share`` has returned, in the process that started the engine.

        Raises UnavailableError if no engine is there, SettingError if the temporary folder's path is too long for a socket.
        """
        try:
            connection = await asyncio.open_unix_connection(str(Path(address) / DOOR))
        except OSError as error:
            raise UnavailableError(
                f"no engine is shared at {address}: it has ended, or this is not its address ({error.strerror or error})"
            ) from error
        try:
            link = AttachedLink(connection)
        except BaseException:
            connection[1].close()
            raise
        return await cls(link).wait_started()
