"""The pair of ZeroMQ sockets between an engine process and its client.

The client binds both in a private 0700 directory, which is removed once the engine has connected.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from contract.decoding import msgpack_decoder
from contract.errors import SettingError
from contract.run_folder import RunFolder
from engine.hosting.messages import FromEngine, ToEngine


@dataclass(frozen=True)
class Addresses:
    """The addresses of one engine process, both bound by its client."""

    to_engine: str
    from_engine: str

    @classmethod
    def within(cls, folder: Path) -> "Addresses":
        """Return Unix sockets in this folder."""
        return cls(f"ipc://{folder}/in", f"ipc://{folder}/out")


class ClientSockets:
    """The client's ends, bound when the constructor returns.

    within: where to make the sockets' folder; None: in the system's temporary one. Raises SettingError if its path is too
    long for a socket.
    """

    def __init__(self, within: Path | None = None) -> None:
        self._folder = RunFolder("engine", within)
        self.addresses = Addresses.within(self._folder.path)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._input.setsockopt(zmq.SNDHWM, 0)
        self._output = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        self._output.setsockopt(zmq.RCVHWM, 0)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgpack_decoder(FromEngine)
        try:
            self._input.bind(self.addresses.to_engine)
            self._output.bind(self.addresses.from_engine)
        except zmq.ZMQError as error:
            self.close()
            raise SettingError(
                f"the engine's sockets cannot be made in {self._folder.path}: {error.strerror}; "
                "set TMPDIR to another (shorter) folder",
                param="TMPDIR",
            ) from error

    def send(self, message: ToEngine) -> None:
        """Send a message without blocking; drop it if the sockets are closed."""
        if self._input.closed:
            return
        with contextlib.suppress(zmq.Again):
            self._input.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromEngine:
        """Return the engine's next message."""
        message: FromEngine = self._decoder.decode(await self._output.recv())
        return message

    async def wait_connected(self) -> None:
        """Wait until the engine, whose first message has come, is connected for input too; then remove the folder.

        The engine connects both sockets at once, but the connections are made one after the other.
        """
        poller = zmq.asyncio.Poller()
        poller.register(self._input, zmq.POLLOUT)
        await poller.poll()
        self._folder.close()

    def close(self) -> None:
        """Close both sockets, and remove their folder. May be called twice."""
        self._folder.close()
        self._input.close(linger=0)
        self._output.close(linger=0)
        self._context.term()
