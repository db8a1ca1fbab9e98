"""A request and its legs, as the router of the explored world keeps them, and the calls to workers."""

from router.tokens.delivery import Delivery

Entry = tuple[int, int, int, tuple[int, ...], str | None, str | None]
"""(request, attempt, first index, tokens, finish reason, error kind)."""
LegCall = tuple[str, str, int, int, int, str | None]
"""(prefill, decode, cancel or hand_off; the worker's boot id; request; attempt; tokens delivered before; the sender's boot
id). In place of the tokens, a cancel has the attempt that was started there, and a hand-off the next attempt."""


class RouterLeg:
    """One worker's part of an attempt; see ``router.attempts.attempt.Leg``."""

    def __init__(self, worker: str, boot: str, first_index: int) -> None:
        self.worker, self.boot, self.first_index = worker, boot, first_index
        self.next_index = first_index
        self.may_hold = True

    @property
    def has_spoken(self) -> bool:
        return self.next_index > self.first_index

    @property
    def is_over(self) -> bool:
        return not self.may_hold and self.has_spoken


class RouterRequest:
    """One request's life; see ``router.attempts.request_run.RequestRun``. ended: how, once it has; it never changes then.

    target: the incarnation on which room is reserved for a move. num_moved: moves after which a token has come.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.delivered: list[int] = []
        self.num_attempts = self.num_failures = self.num_transfer_failures = 0
        self.failed_workers: set[str] = set()
        self.prefer: str | None = None
        self.attempt = -1
        self.delivery = Delivery()
        self.prefill: RouterLeg | None = None
        self.decode: RouterLeg | None = None
        self.num_moves = self.num_moved = 0
        self.next_attempt: int | None = None
        self.target: tuple[str, str] | None = None
        self.rungs: list[str] = []
        self.ended: str | None = None

    @property
    def legs(self) -> list[RouterLeg]:
        return [leg for leg in (self.prefill, self.decode) if leg]

    @property
    def is_bound(self) -> bool:
        return self.decode is not None


def is_started_by(cancel: LegCall, call: LegCall) -> bool:
    """Return whether ``call`` starts the leg that is cancelled: a router sends the cancel after it."""
    return call[0] in ("prefill", "decode") and call[1:3] == cancel[1:3] and call[3] == cancel[4]
