"""A worker's links to all of its routers: one for each address that the setting ``router`` stands for."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from contract.errors import IncompatiblePeerError
from contract.membership import LoadedWeights
from protos import worker_pb2 as pb
from wire.messages import to_proto
from worker.router_addresses import RouterAddresses
from worker.router_stream import LAST_RETRY_SECONDS, RouterAddress, RouterStream, StreamListener

logger = logging.getLogger(__name__)

RESOLVE_SECONDS = 2.0
_FIRST_RESOLVE_SECONDS = 0.2
"""The time until names are resolved again while no address is known."""
_OTHERS_SECONDS = 5.0
"""The time that a worker waits for its other routers once one has accepted it."""


@dataclass(frozen=True)
class _Link:
    stream: RouterStream
    task: asyncio.Task[None]


class RouterLinks:
    """Owns one link for each address. ``run`` keeps them open until it is cancelled.

    An address that is resolved no more loses its link when that link is lost. A router that can be reached at two addresses
    has one link: another stream to it would replace the first one. dial: adds the credentials to an address.
    """

    def __init__(
        self,
        addresses: RouterAddresses,
        dial: Callable[[str], RouterAddress],
        registration: pb.Registration,
        listener: StreamListener,
    ) -> None:
        self._addresses = addresses
        self._dial = dial
        self._registration = registration
        self._listener = listener
        self._links: dict[str, _Link] = {}
        self._resolved = asyncio.Event()
        self._failed: asyncio.Future[None] | None = None

    @property
    def attached(self) -> list[RouterStream]:
        """The streams that are open, oldest address first."""
        return [link.stream for link in self._links.values() if link.stream.is_attached]

    async def wait_tried(self) -> None:
        """Block until every router has accepted this worker or failed to, but only for a few seconds."""
        try:
            async with asyncio.timeout(_OTHERS_SECONDS):
                await self._resolved.wait()
                for link in list(self._links.values()):
                    await link.stream.wait_tried()
        except TimeoutError:
            logger.warning("not all routers have been reached within %g s", _OTHERS_SECONDS)

    def set_weights(self, loaded: LoadedWeights) -> None:
        """Report the worker's weights to every router, and register with them from now on."""
        registration = pb.Registration()
        registration.CopyFrom(self._registration)
        registration.model_fingerprint = loaded.model_fingerprint
        registration.weights_epoch = loaded.epoch
        self._registration = registration
        for link in self._links.values():
            link.stream.registration = registration
            link.stream.send(pb.WorkerMessage(weights_loaded=to_proto(pb.WeightsLoaded, loaded)))

    async def leave(self) -> None:
        """Send goodbye to all routers and wait until the streams have ended; cancel ``run`` soon after."""
        await asyncio.gather(*(stream.leave() for stream in self.attached))

    async def run(self) -> None:
        """Keep a link to each address. Raises IncompatiblePeerError when a router refuses a worker that has no other one."""
        self._failed = asyncio.get_running_loop().create_future()
        resolving = asyncio.create_task(self._keep_resolving(), name="resolve the routers' names")
        try:
            await asyncio.wait({resolving, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (self._failed, resolving):
                if ended.done():
                    ended.result()
        finally:
            tasks = {resolving, *(link.task for link in self._links.values())}
            for task in tasks:
                task.cancel()
            self._failed.cancel()
            await asyncio.wait(tasks)

    async def _keep_resolving(self) -> None:
        while True:
            found = await self._addresses.resolve()
            for address in sorted(found - self._links.keys()):
                stream = RouterStream(
                    self._dial(address),
                    self._registration,
                    self._listener,
                    may_attach=self._until_not_reached,
                )
                task = asyncio.create_task(self._keep(stream), name=f"stream to router {address}")
                task.add_done_callback(self._on_end)
                self._links[address] = _Link(stream, task)
            for address in self._links.keys() - found:
                # A stream that works stays: a name server that forgets a router for a moment must not abort its requests.
                if not self._links[address].stream.is_attached:
                    self._links.pop(address).task.cancel()
            if self._links:
                self._resolved.set()
            await asyncio.sleep(RESOLVE_SECONDS if self._links else _FIRST_RESOLVE_SECONDS)

    async def _keep(self, stream: RouterStream) -> None:
        """Run a stream; a refusal by one of several routers leaves the others as they are."""
        last = ""
        while True:
            try:
                await stream.run()
            except IncompatiblePeerError as error:
                # Only when the others have been tried is it clear that no router accepts this worker.
                for link in [link for link in self._links.values() if link.stream is not stream]:
                    await link.stream.wait_tried()
                if not self.attached:
                    raise
                if error.message != last:
                    logger.warning("%s; the worker serves its other routers", error.message)
                last = error.message
                await asyncio.sleep(LAST_RETRY_SECONDS)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._failed is None or self._failed.done():
            return
        if error := task.exception():
            self._failed.set_exception(error)

    async def _until_not_reached(self, stream: RouterStream) -> None:
        """Block while the router that this stream reached last is reached over another address.

        Of two such addresses the one that came later is tried later, or each would replace the other's stream.
        """
        links = [link.stream for link in self._links.values()]
        twins = [other for other in links if other is not stream and other.router_id == stream.router_id]
        if not stream.router_id or not twins:
            return
        if links.index(twins[0]) < links.index(stream) and not any(twin.is_attached for twin in twins):
            await asyncio.sleep(LAST_RETRY_SECONDS)
        for twin in twins:
            if twin.is_attached and twin.router_id == stream.router_id:
                await twin.wait_detached()
