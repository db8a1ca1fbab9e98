"""The time that the KV of moves needs on its way: bytes over bandwidth."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any


def transfer_seconds(moves: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return for each move the time of the bytes for which it waits: its own, and those in front of it on the same link.

    Answers that leave a worker together for the same target are read one after the other. In front of a move are those whose
    pause overlaps its own and ends no later. The bandwidth is that of all moves away from the same worker, so that a copy
    which was held up does not excuse its own pause.
    """
    num_bytes: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    links: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for move in moves:
        num_bytes[move["source"]] += move["num_bytes"]
        seconds[move["source"]] += move["copying_seconds"]
        links[_link_of(move)].append(move)
    return [
        sum(other["num_bytes"] for other in links[_link_of(move)] if _is_in_front(other, move))
        * seconds[move["source"]]
        / max(1, num_bytes[move["source"]])
        for move in moves
    ]


def _link_of(move: Mapping[str, Any]) -> tuple[str, str]:
    return move["source"], move["targets"][-1]


def _is_in_front(other: Mapping[str, Any], move: Mapping[str, Any]) -> bool:
    begin: float = move["handed_off_at"]
    return begin < _end_of(other) <= _end_of(move)


def _end_of(move: Mapping[str, Any]) -> float:
    end: float = move["handed_off_at"] + move["pause_seconds"]
    return end
