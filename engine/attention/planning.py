"""Plans that the device copies out of one buffer in host memory, as FlashInfer's wrappers make them.

A wrapper's ``plan`` writes into a pinned buffer of its own and starts a copy to the device, without waiting. A step whose
tokens are not read (a chunk of a prompt that goes on) never waits for the device, so the host reaches the next plan while
the copy of the last one has not begun, and would overwrite it.
"""

from typing import Any, Protocol

from torch import Tensor


class Event(Protocol):
    """An event of the device, as ``torch.cuda.Event``."""

    def record(self) -> None:
        """Set it behind everything that was launched before on the current stream."""

    def synchronize(self) -> None:
        """Wait until the device has reached it; return at once if it was never set."""


class PlannedWrapper:
    """A wrapper of FlashInfer whose next plan waits until the device has copied the one before.

    So the host is at most one step of this wrapper ahead of the device.
    """

    def __init__(self, wrapper: Any, copied: Event) -> None:
        self._wrapper = wrapper
        self._copied = copied

    def plan(self, *arguments: Any, **options: Any) -> None:
        """Plan the next runs; see FlashInfer."""
        self._copied.synchronize()
        self._wrapper.plan(*arguments, **options)
        self._copied.record()

    def run(self, query: Tensor, cache: Tensor, output: Tensor | None = None) -> Tensor:
        """Attend as planned last; return ``output``, or a new tensor."""
        attended: Tensor = self._wrapper.run(query, cache, out=output)
        return attended
