"""The ranks of a data-parallel group as one worker, which is what a launcher starts and removes. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Facts = Mapping[str, Any]
KEEPABLE = ("draining", "empty")
"""States of a worker that drains and may serve again."""
DRAINING = (*KEEPABLE, "leaving")
_SUMS = ("num_legs", "max_requests", "num_leg_tokens", "max_tokens")


def by_launcher(workers: Iterable[Facts]) -> dict[str, Facts]:
    """Return the facts of a router's list by the names of launchers: those of a group as of one worker.

    The ranks of group ``decode-0`` have the ids ``decode-0-0``, ``decode-0-1``, ... A group whose ids are others has the
    address of its coordinator as its name: no launcher has started it. A group's facts have ``first_rank``, the id of a
    worker that an order to the group can name.
    """
    groups = defaultdict[str, list[Facts]](list)
    found: dict[str, Facts] = {}
    for worker in workers:
        if worker.get("group") is None:
            found[worker["id"]] = worker
        else:
            groups[worker["group"]].append(worker)
    for address, ranks in groups.items():
        names = {rank["id"].rpartition("-")[0] for rank in ranks}
        name = (names.pop() if len(names) == 1 else "") or address
        found[name] = _as_worker(name, ranks)
    return found


def _as_worker(name: str, ranks: Sequence[Facts]) -> Facts:
    first = ranks[0]
    running = [rank["num_running"] for rank in ranks if rank["num_running"] is not None]
    drained_by = (rank["drained_by"] for rank in ranks if rank.get("drained_by"))
    return {
        **first,
        **{key: sum(rank[key] for rank in ranks) for key in _SUMS},
        "id": name,
        "first_rank": first["id"],
        "state": _state(ranks),
        "num_running": sum(running) if running else None,
        "drained_by": next(drained_by, None),
    }


def _state(ranks: Sequence[Facts]) -> str:
    """Return the state of a group: it serves when all of its ranks do, and is empty when all of them are."""
    states = {rank["state"] for rank in ranks}
    if not states.isdisjoint(DRAINING):
        # An order reaches the ranks one after the other, and so do their answers.
        if states <= {"empty", "leaving"}:
            return "empty" if "empty" in states else "leaving"
        return "draining"
    if "changing" in states or len({rank["role"] for rank in ranks}) > 1:
        return "changing"
    is_complete = len(ranks) >= (ranks[0].get("group_size") or 0)
    return "serving" if is_complete and states == {"serving"} else "starting"
