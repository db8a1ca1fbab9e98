"""Access of coroutines to the folder of files and batches: all blocking calls run on one thread."""

import asyncio
import io
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from contract.errors import UnavailableError
from router.batches.operations import BatchOperations
from router.batches.store import Store

P = ParamSpec("P")
T = TypeVar("T")


class Storage:
    """Owns the thread. Call ``store`` and ``operations`` through ``run`` only, so that no two calls overlap."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.operations = BatchOperations(store)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="files")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of ``work``, called on the thread in order of arrival.

        If the caller is cancelled, the call is still made, and a file that it opens is closed. Raises the errors of
        ``work``, with UnavailableError in place of OSError.
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
        """Unlock the folder after all earlier calls."""
        await self.run(self.store.close)
        self._thread.shutdown(wait=False)


def _close(call: "Future[Any]") -> None:
    """Close the file that a call has opened for a cancelled caller."""
    if not call.cancelled() and call.exception() is None and isinstance(opened := call.result(), io.IOBase):
        opened.close()
