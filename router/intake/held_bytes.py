"""A bound on the bytes of all requests that the router holds, from their arrival to the end of their answers."""

from contract.errors import OverloadedError


class HeldBytes:
    """Owns the count of the bytes of all requests that the router holds, by client.

    The bound on the queue counts requests, and one request may have a thousand times the bytes of another. When
    ``max_bytes`` are held, a client that holds less than its share (``max_bytes`` divided by the clients that hold any) is
    still admitted. Therefore no client is kept out by the others, and at most ``2 * max_bytes`` are held.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_tenant: dict[str, int] = {}
        self.num_bytes = 0
        """The bytes of all requests."""

    def holding(self, tenant: str, num_bytes: int) -> "Holding":
        """Return a block in which a request's bytes are counted. To enter it raises OverloadedError if there is no room."""
        return Holding(self, tenant, num_bytes)

    def add(self, tenant: str, num_bytes: int) -> None:
        """Count bytes of a request. Raises OverloadedError if there is no room for them."""
        if self.num_bytes + num_bytes > self._max_bytes and not self._is_within_share(tenant, num_bytes):
            raise OverloadedError(
                f"the requests that wait or are answered have {self.num_bytes} bytes together, and the limit is "
                f"{self._max_bytes} (max_held_bytes); send this one again later"
            )
        self._count(tenant, num_bytes)

    def remove(self, tenant: str, num_bytes: int) -> None:
        """Stop counting bytes of a request."""
        self._count(tenant, -num_bytes)

    def _count(self, tenant: str, difference: int) -> None:
        self.num_bytes += difference
        if held := self._by_tenant.get(tenant, 0) + difference:
            self._by_tenant[tenant] = held
        else:
            self._by_tenant.pop(tenant, None)

    def _is_within_share(self, tenant: str, num_bytes: int) -> bool:
        num_clients = len(self._by_tenant.keys() | {tenant})
        return (
            num_clients > 1 and self._by_tenant.get(tenant, 0) + num_bytes <= self._max_bytes // num_clients
        )


class Holding:
    """A block in which the bytes of one request are counted."""

    def __init__(self, held: HeldBytes, tenant: str, num_bytes: int) -> None:
        self._held = held
        self._tenant = tenant
        self._num_bytes = num_bytes

    def __enter__(self) -> None:
        self._held.add(self._tenant, self._num_bytes)

    def __exit__(self, *_: object) -> None:
        self._held.remove(self._tenant, self._num_bytes)
