"""Scenarios of several routers: who asks for what, and the credit that the routers share."""

from dataclasses import dataclass

from tests.protocol.scenario import Scenario


@dataclass(frozen=True)
class RoutersScenario(Scenario):
    """Workers that compute whole answers, and routers that share their credit.

    owners: the incarnation of the router that gets each request; one that is not started yet gets it when it starts.
    credit: legs that each worker takes at a time from all routers together. is_settled: the first credits have arrived when
    it begins. routers_return: a router that has died is started again.
    """

    num_prefill: int = 0
    num_decode: int = 0
    num_routers: int = 2
    num_workers: int = 1
    owners: tuple[str, ...] = ("R0.1", "R1.1")
    credit: int = 1
    is_settled: bool = False
    routers_return: bool = True

    @property
    def worker_names(self) -> list[str]:
        """The names of all workers."""
        return [f"W{index}" for index in range(self.num_workers)]

    def credit_of(self, worker: str) -> int:
        """Return how many legs a worker takes at a time."""
        return self.credit

    @property
    def is_planned(self) -> bool:
        """True if nothing fails: the credit is only divided again at other moments."""
        return set(self.faults) <= {"divide"}
