"""Divides one limit among several holders that bind work on their own, so that together they never exceed it.

A holder learns of a lower share by a message, and may have bound more before that message arrived. Therefore what it was
given stays committed until it has answered: it then reports what it holds. Only what no holder can use any more is given to
another one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
        free = self.total - self.num_committed
        for share in sorted(self._shares.values(), key=lambda share: share.share):
            reachable = max(share.share, min(share.target, share.committed + max(0, free)))
            free -= max(0, reachable - share.committed)
            share.share = reachable
            share.committed = max(share.committed, reachable)

    def report(self, holder: str, used: int, *, has_seen_all: bool) -> None:
        """Take a holder's report of what it holds. has_seen_all: it has received what it was given last."""
        share = self._shares[holder]
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
