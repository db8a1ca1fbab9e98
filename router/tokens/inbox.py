"""Tokens that clients have not read yet, and bounds on their bytes."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from contract.errors import CancelledError, KvbatonError
from protos import worker_pb2 as pb

Event = pb.TokenEntry | KvbatonError
Item = TypeVar("Item")
Consume = Callable[[Item], bool]
"""Consumes an item in the turn of the event loop in which it arrives; returns False to leave it to the waiting reader.

It is the one callback on a token's way out. A worker's stream calls ``Attempt._receive`` for each entry; the tokens that
are due (``AttemptOutput.release``) are offered to the callback of the waiting reader, which makes a delta of them and writes
that to the client's connection (``DeltaSink``): no task is woken. What it leaves waits in the inbox for the reader's task.
"""
_FULL_ANSWERS = 4
"""The number of full answers of one request that may be unread, all together."""


class UnreadAccount:
    """Counts the unread bytes of one client's request, over all its answers, until its block or ``close`` ends it.

    Made by ``UnreadBytes.open``.
    """

    def __init__(self, owner: "UnreadBytes", tenant: str) -> None:
        self._owner = owner
        self.tenant = tenant
        self.num_bytes = 0
        self._on_overflow: set[Callable[[CancelledError], None]] = set()

    def __enter__(self) -> "UnreadAccount":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Count nothing more."""
        self._owner.close(self)

    def add(self, num_bytes: int) -> None:
        """Count bytes that arrived, or with a negative number bytes that were read. May end this request or another one."""
        self.num_bytes += num_bytes
        self._owner.count(self, num_bytes)

    def end_with(self, on_overflow: Callable[[CancelledError], None]) -> None:
        """Call ``on_overflow`` when the request holds too many bytes."""
        self._on_overflow.add(on_overflow)

    def forget(self, on_overflow: Callable[[CancelledError], None]) -> None:
        """Do not call ``on_overflow`` any more."""
        self._on_overflow.discard(on_overflow)

    def overflow(self, error: CancelledError) -> None:
        """End every answer of the request with ``error``, and drop what the client has not read."""
        for end in list(self._on_overflow):
            end(error)


class UnreadBytes:
    """Owns the count of all unread bytes in the router.

    max_of_answer: of one answer; a request of several answers may have four times as many. max_total: of all requests;
    beyond it the largest request of the tenant that holds most is ended.
    """

    def __init__(self, max_of_answer: int, max_total: int) -> None:
        self.max_of_answer = max_of_answer
        self._max_total = max(max_total, max_of_answer)
        self._accounts: set[UnreadAccount] = set()
        self.num_bytes = 0

    def open(self, tenant: str) -> UnreadAccount:
        """Open an account for one request of a client."""
        account = UnreadAccount(self, tenant)
        self._accounts.add(account)
        return account

    def close(self, account: UnreadAccount) -> None:
        """Close an account. Does nothing the second time."""
        if account in self._accounts:
            self._accounts.remove(account)
            self.num_bytes -= account.num_bytes

    def count(self, account: UnreadAccount, num_bytes: int) -> None:
        """Count bytes of an open account, and end the request that holds too many, if one does."""
        if account not in self._accounts:
            return
        self.num_bytes += num_bytes
        if num_bytes <= 0:
            return
        limit = _FULL_ANSWERS * self.max_of_answer
        if account.num_bytes > limit:
            account.overflow(_too_slow(f"more than {limit} bytes of its answers wait for it"))
        elif self.num_bytes > self._max_total:
            text = f"more than {self._max_total} bytes wait for all clients, and most of them for it"
            self._largest().overflow(_too_slow(text))

    def _largest(self) -> UnreadAccount:
        by_tenant: defaultdict[str, int] = defaultdict(int)
        for account in self._accounts:
            by_tenant[account.tenant] += account.num_bytes
        return max(self._accounts, key=lambda each: (by_tenant[each.tenant], each.num_bytes))


def _do_nothing() -> None:
    pass


class Inbox(Generic[Item]):
    """Owns the unread items of one attempt, which one task reads. ``on_overflow`` is called once if they are too large.

    It does less than ``asyncio.Queue``: every token of every answer passes it.
    """

    def __init__(
        self, account: UnreadAccount, max_bytes: int, on_overflow: Callable[[], None] = _do_nothing
    ) -> None:
        self._account = account
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.on_overflow = on_overflow
        self._items: deque[tuple[Item | KvbatonError, int]] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._consume: Consume[Item] | None = None
        self.is_overfull = False
        account.end_with(self._overflow)

    def offer(self, item: Item) -> bool:
        """Return True if the waiting reader has consumed an item at once. It fails with the error that this has raised.

        A reader waits only while nothing is unread.
        """
        if self._consume is None or self._arrival is None or self._arrival.done():
            return False
        try:
            return self._consume(item)
        except Exception as error:  # noqa: BLE001 - the reader raises it
            self._arrival.set_exception(error)
            return True

    def put(self, item: Item | KvbatonError, num_bytes: int = 0) -> None:
        """Append an item. It is dropped once the inbox has overflowed."""
        if self.is_overfull:
            return
        self._append(item, num_bytes)
        self._num_bytes += num_bytes
        self._account.add(num_bytes)
        if self._num_bytes > self._max_bytes and not self.is_overfull:
            self._overflow(_too_slow(f"more than {self._max_bytes} bytes wait for it"))

    async def get(self, consume: Consume[Item] | None = None) -> Item:
        """Return the oldest unread item, or raise it if it is an error.

        consume: is called with the items that arrive while the caller waits. Those that it consumes are not returned.
        """
        self._consume = consume
        while not self._items:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        item, num_bytes = self._items.popleft()
        self._num_bytes -= num_bytes
        self._account.add(-num_bytes)
        if isinstance(item, KvbatonError):
            raise item
        return item

    def close(self) -> None:
        """Drop what is unread: the client does not read any more."""
        self._consume = None
        self.on_overflow = _do_nothing  # a cycle of references would wait for the search for garbage
        self._account.forget(self._overflow)
        self._drop()

    def _overflow(self, error: CancelledError) -> None:
        self.is_overfull = True
        self._drop()
        self._append(error, 0)
        self.on_overflow()

    def _append(self, item: Item | KvbatonError, num_bytes: int) -> None:
        self._items.append((item, num_bytes))
        if self._arrival and not self._arrival.done():
            self._arrival.set_result(None)

    def _drop(self) -> None:
        self._items.clear()
        if self._num_bytes:
            self._account.add(-self._num_bytes)
            self._num_bytes = 0


def size_of(entry: pb.TokenEntry) -> int:
    """Return the bytes that an unread entry counts. A prompt's log probabilities are sent once, and do not count."""
    return 0 if entry.prompt_logprobs else entry.ByteSize()


def _too_slow(what: str) -> CancelledError:
    return CancelledError(f"the client reads too slowly: {what}; the request is cancelled")
