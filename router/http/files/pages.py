"""Paged lists of objects, with OpenAI's ``limit``, ``order`` and ``after``."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from aiohttp import web

from contract.errors import InvalidRequestError
from router.http.bodies.body import Json


class _Listed(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=_Listed)


def page(
    request: web.Request,
    oldest_first: Sequence[Item],
    show: Callable[[Item], Json],
    *,
    default: int,
    limit: int,
) -> Json:
    """Return one page of the list. default: default page size. limit: largest page size. Raises InvalidRequestError."""
    items = list(oldest_first)
    if _order(request) == "desc":
        items.reverse()
    first = _place_after(request.query.get("after"), items)
    size = _limit(request, default, limit)
    data = [show(item) for item in items[first : first + size]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": first + size < len(items),
    }


def _order(request: web.Request) -> str:
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order is {order[:20]!r}; it must be asc or desc", param="order")
    return order


def _limit(request: web.Request, default: int, limit: int) -> int:
    given = request.query.get("limit")
    if given is None:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and 1 <= int(given) <= limit):
        raise InvalidRequestError(f"limit is {given[:20]!r}; it must lie in 1..{limit}", param="limit")
    return int(given)


def _place_after(after: str | None, items: Sequence[Item]) -> int:
    if after is None:
        return 0
    found = next((place for place, item in enumerate(items) if item.id == after), None)
    if found is None:
        raise InvalidRequestError(f"after is {after[:80]!r}, which is not one of the objects", param="after")
    return found + 1
