"""The parts of a worker's credit that its routers get.

``DividedLimit`` divides one limit among several holders that bind work on their own, so that together they never exceed it.
A holder learns of a lower share by a message, and may have bound more before that message arrived. Therefore what it was
given stays committed until it has answered: it then reports what it holds. Only what no holder can use any more is given to
another one. ``CreditShares`` divides the two limits of a credit so, requests and tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from contract.membership import Credit, CreditUse
from wire.messages import BadNumberError

_SLACK = 10
"""An idle holder counts as if it used this part (a tenth) of an equal share, so that it can begin work at once."""
_PRESSED = 4
"""A holder that has used all but this part (a quarter) of its share gets more as soon as the shares are planned again."""


@dataclass
class _Share:
    """One holder's part. target: what it is to get. share: what it was given last. committed: the most that it may hold.

    num_waits: plans in a row before which it had nothing.
    """

    target: int = 0
    share: int = 0
    committed: int = 0
    num_waits: int = 0


class DividedLimit:
    """Owns the shares of one limit. Every method takes time in proportion to the number of holders.

    At every instant the sum of what the holders may hold is at most ``total``, or no more than it was before ``total`` was
    lowered. While ``total`` reaches, every holder gets at least 1.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._shares: dict[str, _Share] = {}

    @property
    def num_committed(self) -> int:
        """The most that all holders may hold together."""
        return sum(share.committed for share in self._shares.values())

    def share_of(self, holder: str) -> int:
        """Return what a holder was given last."""
        return self._shares[holder].share

    def most_of(self, holder: str) -> int:
        """Return the most that a holder may hold now, as far as is known."""
        return self._shares[holder].committed

    def open(self, holder: str) -> None:
        """Add a holder, which gets its share by the next plan."""
        self._shares[holder] = _Share()

    def close(self, holder: str) -> None:
        """Remove a holder that can hold nothing any more."""
        del self._shares[holder]

    def plan(self, used: Mapping[str, int], *, is_new: bool = False) -> None:
        """Decide what each holder is to get, from what it has used lately.

        is_new: the holders or the total have changed. Otherwise small differences change nothing.
        """
        for share in self._shares.values():
            share.num_waits = 0 if share.share else share.num_waits + 1
        targets = dict(self._targets(used)) if self._shares else {}
        if is_new or any(self._is_worth_it(holder, target, used) for holder, target in targets.items()):
            for holder, target in targets.items():
                self._shares[holder].target = target

    def settle(self) -> None:
        """Lower shares to their targets, and raise others as far as no other holder can still use what they get."""
        for share in self._shares.values():
            share.share = min(share.share, share.target)
        # Below 0 while holders have not answered yet that the total was lowered.
        free = self.total - self.num_committed
        # The smallest shares first: a holder with nothing can begin no work at all.
        for share in sorted(self._shares.values(), key=lambda share: share.share):
            reachable = max(share.share, min(share.target, share.committed + max(0, free)))
            free -= max(0, reachable - share.committed)
            share.share = reachable
            share.committed = max(share.committed, reachable)

    def report(self, holder: str, used: int, *, has_seen_all: bool) -> None:
        """Take a holder's report of what it holds. has_seen_all: it has received what it was given last."""
        share = self._shares[holder]
        # A report that crossed a lower credit proves nothing: the holder could still bind by the share of before.
        share.committed = max(used, share.share if has_seen_all else share.committed)

    def must_ask(self, holder: str) -> bool:
        """Return True if another holder waits for what this one may still hold beyond its share."""
        share = self._shares[holder]
        is_short = any(other.target > other.share for other in self._shares.values())
        return is_short and share.committed > share.share

    def _targets(self, used: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        """Yield each holder's part: in proportion to its use and a slack, rounded so that the sum is the total.

        The largest remainders are rounded up. If the total is smaller than the number of holders, they take turns.
        """
        num_holders = len(self._shares)
        least = 1 if self.total >= num_holders else 0
        spare = self.total - least * num_holders
        weights = {name: used.get(name, 0) * _SLACK * num_holders + self.total for name in self._shares}
        whole = sum(weights.values()) or 1
        parts = {name: spare * weight // whole for name, weight in weights.items()}
        by_remainder = sorted(
            weights,
            key=lambda name: (0 if least else self._shares[name].num_waits, spare * weights[name] % whole),
            reverse=True,
        )
        rounded_up = set(by_remainder[: spare - sum(parts.values())]) if self.total else set()
        for name, part in parts.items():
            yield name, least + part + (name in rounded_up)

    def _is_worth_it(self, holder: str, target: int, used: Mapping[str, int]) -> bool:
        """Return True if a new target differs enough from the present one to send messages for it."""
        share = self._shares[holder]
        difference = target - share.target
        is_pressed = used.get(holder, 0) * _PRESSED >= share.share * (_PRESSED - 1)
        if is_pressed and difference > 0:
            return difference >= max(1, share.target // 32)
        takes_turns = self.total < len(self._shares)
        return abs(difference) >= (1 if takes_turns or not share.target else max(1, self.total // 16))


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
        # Not before it has answered the last credit: that answer may be enough, and is on its way.
        names = {
            name
            for name in self.sessions
            if self._has_seen_all(name) and (self._requests.must_ask(name) or self._tokens.must_ask(name))
        }
        return self._planned(used, always=frozenset(names))

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
        return self._settle()

    def _set_total(self, total: Credit) -> None:
        self._total = total
        self._requests.total = total.max_requests
        self._tokens.total = total.max_tokens

    def _has_seen_all(self, session: str) -> bool:
        return self._seen[session] == self._numbers[session]

    def _planned(
        self, used: Mapping[str, Use], *, always: frozenset[str] = frozenset(), is_new: bool = False
    ) -> dict[str, Credit]:
        self._requests.plan({name: use.num_requests for name, use in used.items()}, is_new=is_new)
        self._tokens.plan({name: use.num_tokens for name, use in used.items()}, is_new=is_new)
        return self._settle(always)

    def _settle(self, always: frozenset[str] = frozenset()) -> dict[str, Credit]:
        """Move the shares towards their targets; return a credit for each session whose share has changed."""
        before = {name: self.share_of(name) for name in self._numbers}
        self._requests.settle()
        self._tokens.settle()
        credits = {}
        for name, former in before.items():
            share = self.share_of(name)
            if name in always or share != former:
                self._numbers[name] += 1
                credits[name] = msgspec.structs.replace(
                    self._total,
                    max_requests=share.num_requests,
                    max_tokens=share.num_tokens,
                    number=self._numbers[name],
                )
        return credits
