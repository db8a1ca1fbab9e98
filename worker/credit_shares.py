"""The parts of a worker's credit that its routers get."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from contract.membership import Credit, CreditUse
from wire.numbers import BadNumberError
from worker.divided_limit import DividedLimit


@dataclass(frozen=True)
class Use:
    """Legs, and tokens of these legs."""

    num_requests: int = 0
    num_tokens: int = 0


class CreditShares:
    """Divides a worker's credit among the sessions of its routers. Pure: the caller sends the credits that are returned.

    Requests and tokens are divided independently. Each credit has a number, which the router repeats when it reports what
    it holds. num_overdrawn: reports of more legs than the router was given.
    """

    def __init__(self, total: Credit) -> None:
        self.num_overdrawn = 0
        self._total = total
        self._requests = DividedLimit(total.max_requests)
        self._tokens = DividedLimit(total.max_tokens)
        self._numbers: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._reports: dict[str, CreditUse] = {}

    @property
    def sessions(self) -> frozenset[str]:
        """The open sessions."""
        return frozenset(self._numbers)

    @property
    def num_committed(self) -> Use:
        """The most that all routers together may hold, as far as is known."""
        return Use(self._requests.num_committed, self._tokens.num_committed)

    @property
    def are_answered(self) -> bool:
        """True if every router has answered its last credit."""
        return self._seen == self._numbers

    @property
    def num_former(self) -> int:
        """Legs of the worker's former role, and moves away from it, by the routers' last reports."""
        return sum(report.num_former for report in self._reports.values())

    @property
    def need_role(self) -> bool:
        """True if a router has answered that the worker must keep its role."""
        return any(report.needs_role for report in self._reports.values())

    def share_of(self, session: str) -> Use:
        """Return what a router was given last."""
        return Use(self._requests.share_of(session), self._tokens.share_of(session))

    def open(self, session: str, total: Credit, used: Mapping[str, Use]) -> dict[str, Credit]:
        """Add a session and divide ``total``; return the credits to send, its own among them. used: lately, by session."""
        self._set_total(total)
        for limit in (self._requests, self._tokens):
            limit.open(session)
        self._numbers[session] = 0
        self._seen[session] = 0
        self._reports[session] = CreditUse()
        return self._planned(used, always=frozenset({session}), is_new=True)

    def close(self, session: str, used: Mapping[str, Use]) -> dict[str, Credit]:
        """Remove a session, whose legs are bound no more; return the credits to send to the others."""
        for limit in (self._requests, self._tokens):
            limit.close(session)
        del self._numbers[session], self._seen[session], self._reports[session]
        return self._planned(used, is_new=True)

    def set_total(self, total: Credit, used: Mapping[str, Use]) -> dict[str, Credit]:
        """Divide another credit from now on; return the credits to send, one for every session."""
        self._set_total(total)
        return self._planned(used, always=self.sessions, is_new=True)

    def plan(self, used: Mapping[str, Use]) -> dict[str, Credit]:
        """Divide the credit by what each session has used lately; return the credits to send.

        A router whose share was lowered below its use gets its credit again, so that it reports what it holds now.
        """
        asked = {name for name in self.sessions if self._has_seen_all(name) and self._must_ask(name)}
        return self._planned(used, always=frozenset(asked))

    def report(self, session: str, use: CreditUse) -> dict[str, Credit]:
        """Take a router's report of what it holds; return the credits to send, now that more may be free.

        Raises BadNumberError if it answers a credit that was not sent.
        """
        if use.number > self._numbers[session]:
            raise BadNumberError(
                f"CreditUse.number is {use.number}; the last credit has {self._numbers[session]}",
                param="CreditUse.number",
            )
        self._seen[session] = max(self._seen[session], use.number)
        self._reports[session] = use
        self.num_overdrawn += use.num_requests > self._requests.most_of(session)
        has_seen_all = self._has_seen_all(session)
        self._requests.report(session, use.num_requests, has_seen_all=has_seen_all)
        self._tokens.report(session, use.num_tokens, has_seen_all=has_seen_all)
        return self._settled()

    def _set_total(self, total: Credit) -> None:
        self._total = total
        self._requests.total = total.max_requests
        self._tokens.total = total.max_tokens

    def _has_seen_all(self, session: str) -> bool:
        return self._seen[session] == self._numbers[session]

    def _must_ask(self, session: str) -> bool:
        return self._requests.must_ask(session) or self._tokens.must_ask(session)

    def _planned(
        self, used: Mapping[str, Use], *, always: frozenset[str] = frozenset(), is_new: bool = False
    ) -> dict[str, Credit]:
        self._requests.plan({name: use.num_requests for name, use in used.items()}, is_new=is_new)
        self._tokens.plan({name: use.num_tokens for name, use in used.items()}, is_new=is_new)
        return self._settled(always)

    def _settled(self, always: frozenset[str] = frozenset()) -> dict[str, Credit]:
        """Move the shares towards their targets; return a credit for each session whose share has changed."""
        before = {name: self.share_of(name) for name in self._numbers}
        self._requests.settle()
        self._tokens.settle()
        return {
            name: self._next_credit(name)
            for name, share in before.items()
            if name in always or share != self.share_of(name)
        }

    def _next_credit(self, session: str) -> Credit:
        self._numbers[session] += 1
        share = self.share_of(session)
        return msgspec.structs.replace(
            self._total,
            max_requests=share.num_requests,
            max_tokens=share.num_tokens,
            number=self._numbers[session],
        )
