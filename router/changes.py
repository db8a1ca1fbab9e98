"""One signal for "the workers, or what is known of the model, have changed"."""

import asyncio


class ChangeSignal:
    """Take ``next`` first, look at the state, then wait on what was taken: so no change is missed."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """An event that the next change sets."""
        return self._next

    def tell(self) -> None:
        """Something has changed."""
        self._next.set()
        self._next = asyncio.Event()
