"""The folder of files and batches for coroutines: every call that may block runs on one thread of its own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from contract.errors import UnavailableError
from router.batches.desk import BatchDesk
from router.batches.store import Store

P = ParamSpec("P")
T = TypeVar("T")


class Library:
    """Owns the thread. ``store`` and ``desk`` are used by ``run`` only, so that no two calls overlap."""

    def __init__(self, store: Store) -> None:
        self.store, self.desk = store, BatchDesk(store)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="files")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``work`` on the thread, in turn. A caller that is cancelled does not wait; the call is made nevertheless.

        Raises what it raises, and UnavailableError in the place of OSError.
        """
        try:
            call = asyncio.wrap_future(self._thread.submit(partial(work, *args, **kwargs)))
            return await asyncio.shield(call)
        except OSError as error:
            raise UnavailableError(
                f"the folder of files cannot be used: {error.strerror or error}", code="storage_unavailable"
            ) from error

    async def open(self) -> None:
        """Lock and read the folder. Raises SettingError, UnavailableError."""
        await self.run(self.store.open)

    async def close(self) -> None:
        """Let others use the folder, when every call that was made is over."""
        await self.run(self.store.close)
        self._thread.shutdown(wait=False)
