"""The reload of a worker's weights while its process stays, in steps that a router orders (``WorkerServicer``).

1. ``pause``: every router gets a credit of nothing, as if others held all of it, so that requests wait and no role counts
   as missing. Legs that are bound continue. The block begins when no router has a leg bound here and no KV is lent.
2. ``load``: the engine reads the weights, drops its cache and has its peers shake hands again.
3. The end of the block, in whatever way: the routers get the fingerprint, and then credit again. The block is the lease of
   the router that has ordered it. Without ``load``, the worker serves on as before.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from contract.errors import InvalidRequestError, KvbatonError, SettingError, UnavailableError
from contract.membership import LoadedWeights, ReloadReport
from engine.client import EngineClient
from worker.draining import Emptiness
from worker.lifecycle import Lifecycle

logger = logging.getLogger(__name__)


class Reload:
    """Reloads the weights of one worker, for one router at a time.

    publish: reports the weights to every router, and registers with them from then on. announce: called when the credit has
    changed.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        engine: EngineClient,
        emptiness: Emptiness,
        publish: Callable[[LoadedWeights], None],
        announce: Callable[[], None],
    ) -> None:
        self._lifecycle = lifecycle
        self._engine = engine
        self._emptiness = emptiness
        self._publish = publish
        self._announce = announce
        self._epoch = 0
        self._load: asyncio.Task[str] | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()

    @property
    def is_loading(self) -> bool:
        """True from the order to load until the end of the reload."""
        return self._load is not None

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Keep the credit back within the block, which begins when nothing is bound, running or lent.

        Raises InvalidRequestError if the worker drains, changes its role or is being reloaded, SettingError if the folder
        has another model now, UnavailableError if it is stopping.
        """
        lifecycle = self._lifecycle
        lifecycle.check_open()
        if lifecycle.is_reloading:
            raise InvalidRequestError("its weights are being reloaded already")
        if lifecycle.is_draining or lifecycle.next_role or lifecycle.is_unsettled:
            raise InvalidRequestError("it drains, or changes its role")
        lifecycle.is_reloading = True
        former_epoch = self._epoch
        try:
            await self._engine.call("check_reload")
            self._announce()
            self._emptiness.watch()
            await self._emptiness.unbound.wait()
            yield
        finally:
            # In a task: a router that is lost cancels this one, and the engine may still be reading the weights.
            self._reopening = asyncio.create_task(self._reopen(former_epoch), name="serve after a reload")

    async def load(self, epoch: int) -> ReloadReport:
        """Read the weights, and return their fingerprint, or why none were read. epoch: of this reload.

        If the engine has no weights any more, this process ends after the block, so that the router has read why.
        """
        self._epoch = epoch
        self._load = asyncio.create_task(self._engine.reload_weights(), name="reload the weights")
        try:
            return ReloadReport(model_fingerprint=await asyncio.shield(self._load))
        except (InvalidRequestError, SettingError) as error:
            # No end of the call: with credit, requests would be bound to the former weights while others load.
            return ReloadReport(error=error.message)
        except KvbatonError as error:
            return ReloadReport(error=error.message, is_lost=True)

    def keep_epoch(self, epoch: int) -> None:
        """Count the weights that were read as those of this reload. 0: the router serves others, and will refuse them."""
        self._epoch = epoch

    def on_leg_accepted(self) -> None:
        """Record a leg that was sent before its router received the credit of nothing."""
        if self._lifecycle.is_reloading:
            self._emptiness.watch()

    async def until_lost(self) -> None:
        """Wait until the former weights are gone and no others could be read. Raises UnavailableError then."""
        await self._lost.wait()
        raise UnavailableError("the weights could not be reloaded, and the former ones are gone")

    async def _reopen(self, former_epoch: int) -> None:
        """Serve again when the engine has read the weights or has refused to; a worker without weights stays closed."""
        self._emptiness.close()
        load = self._load
        self._load = None
        if load is None:
            self._epoch = former_epoch
        else:
            await asyncio.wait({load})
            if (error := load.exception()) is None:
                self._epoch = self._epoch or former_epoch
                self._publish(LoadedWeights(model_fingerprint=load.result(), epoch=self._epoch))
            elif isinstance(error, InvalidRequestError | SettingError):
                self._epoch = former_epoch
            else:
                self._lost.set()
                return
        self._lifecycle.is_reloading = False
        self._announce()
