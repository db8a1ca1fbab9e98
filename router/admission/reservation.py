"""Credit that is held for a request between the decision to admit it and the beginning of its legs."""

from collections.abc import Callable, Sequence

from router.admission.start_limiter import Start
from router.routing.legs import Placement
from router.routing.policy import PlacementRequest
from router.workers.attached_worker import AttachedWorker
from router.workers.capacity import CreditHold


class Reservation:
    """A placement, and credit on its workers for the choices of a prompt that may begin.

    The admission queue makes it: from then on its later decisions count the credit as used, and ``start`` counts as one of
    the client's starts. The legs of the attempts take the credit over (``take``). What they have not taken is released when
    the reservation's block ends.

    workers: one for each leg of the placement. They are the incarnations that were chosen; some may have been lost since.
    """

    def __init__(
        self,
        placement: Placement,
        workers: Sequence[AttachedWorker],
        request: PlacementRequest,
        tenant: str,
        start: Start,
    ) -> None:
        self.placement = placement
        self.workers = tuple(workers)
        self._holds: list[list[CreditHold]] = []
        for tokens in _tokens_of_choices(request, len(self.workers)):
            legs = zip(workers, tokens, strict=True)
            self._holds.append([worker.capacity.hold(tenant, num_tokens) for worker, num_tokens in legs])
        self._start: Start | None = start

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def num_choices(self) -> int:
        """The choices of the prompt for which it holds credit that no leg has taken over."""
        return len(self._holds)

    @property
    def lost_workers(self) -> list[AttachedWorker]:
        """Workers that were lost after they had been chosen."""
        return [worker for worker in self.workers if worker.gone.is_set()]

    def take(self) -> list[list[CreditHold]]:
        """Return the credit of each choice, a hold for each leg. The legs release it from now on. Called once."""
        holds = self._holds
        self._holds = []
        return holds

    def begun(self, num_orders: int) -> Callable[[], None]:
        """Count the start until the orders that start the legs were sent. Return a function to call for each of them."""
        assert self._start is not None, "begun twice"
        start = self._start
        self._start = None
        start.num_orders = num_orders
        return start.sent

    def release(self) -> None:
        """Give back the credit that no leg has taken, and end a start that was not begun. Does nothing the second time."""
        for holds in self.take():
            for hold in holds:
                hold.release()
        if self._start:
            self._start.end()
            self._start = None


def _tokens_of_choices(request: PlacementRequest, num_legs: int) -> list[list[int]]:
    """Return the tokens that each leg of each choice counts: the prompt once, each answer on the worker where it ends."""
    answer = [0] * (num_legs - 1) + [request.num_answer_tokens]
    first = [request.num_prompt_tokens + num_tokens for num_tokens in answer]
    return [first, *[answer] * (request.num_choices - 1)]
