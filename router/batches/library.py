"""The folder of files and batches for coroutines: every call that may block runs on one thread of its own."""

import asyncio
import io
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

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

        A file that it opens for such a caller is closed. Raises what it raises, and UnavailableError for OSError.
        """
        call = self._thread.submit(partial(work, *args, **kwargs))
        try:
            return await asyncio.shield(asyncio.wrap_future(call))
        except asyncio.CancelledError:
            call.add_done_callback(_close)
            raise
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


def _close(call: "Future[Any]") -> None:
    """Close what a call has opened that nobody waits for any more."""
    if not call.cancelled() and call.exception() is None and isinstance(opened := call.result(), io.IOBase):
        opened.close()
