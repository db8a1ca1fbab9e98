"""Plans in one buffer of host memory that a slow device copies later: none is overwritten before it was copied."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.attention.planning import PlannedWrapper


class SlowStream:
    """Runs what was launched only when the host waits for it. num_waiting_most: the longest queue so far."""

    def __init__(self) -> None:
        self.num_waiting_most = 0
        self._launched = deque[Callable[[], object]]()

    def launch(self, work: Callable[[], object]) -> None:
        self._launched.append(work)
        self.num_waiting_most = max(self.num_waiting_most, len(self._launched))

    def run_until(self, has_happened: Callable[[], bool]) -> None:
        while not has_happened():
            self._launched.popleft()()

    def drain(self) -> None:
        self.run_until(lambda: not self._launched)


class SlowEvent:
    """An event of that stream."""

    def __init__(self, stream: SlowStream) -> None:
        self._stream = stream
        self._num_recorded = 0
        self._num_reached = 0

    def record(self) -> None:
        self._num_recorded += 1
        self._stream.launch(self._reach)

    def synchronize(self) -> None:
        self._stream.run_until(lambda: self._num_reached == self._num_recorded)

    def _reach(self) -> None:
        self._num_reached += 1


class UnguardedWrapper:
    """Plans as FlashInfer does: into one buffer on the host, from which the stream copies later."""

    def __init__(self, stream: SlowStream) -> None:
        self._stream = stream
        self._on_host = torch.zeros(1)
        self._on_device = torch.zeros(1)

    def plan(self, number: float, *, options: Any) -> None:
        assert options == "given"
        self._on_host.fill_(number)
        self._stream.launch(lambda: self._on_device.copy_(self._on_host))

    def run(self, query: Tensor, cache: Tensor, out: Tensor | None = None) -> Tensor:
        assert out is None
        output = torch.full_like(query, torch.nan)
        self._stream.launch(lambda: output.copy_(query + cache + self._on_device))
        return output


def outputs_of(steps: int, stream: SlowStream, wrapper: Any) -> list[float]:
    """Plan and run steps whose outputs are not read before the last one is launched."""
    outputs = []
    for number in range(steps):
        wrapper.plan(float(number), options="given")
        outputs += [wrapper.run(torch.zeros(1), torch.full((1,), 100.0)) for _layer in range(3)]
    stream.drain()
    return [float(output) for output in outputs]


def test_no_plan_is_overwritten_before_it_is_copied() -> None:
    stream = SlowStream()
    wrapper = PlannedWrapper(UnguardedWrapper(stream), SlowEvent(stream))
    assert outputs_of(5, stream, wrapper) == [100.0 + number for number in range(5) for _layer in range(3)]
    assert stream.num_waiting_most <= 2 * (3 + 2), "the host may be one step ahead"


def test_without_the_wait_the_device_sees_later_plans() -> None:
    """The fakes show the fault: a stream that is behind copies the last plan for every step."""
    stream = SlowStream()
    assert outputs_of(5, stream, UnguardedWrapper(stream)) == [104.0] * 15
