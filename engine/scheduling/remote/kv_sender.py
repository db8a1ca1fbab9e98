"""The sending side of hand-overs: the blocks of prefill legs, and of requests that are handed off, are lent.

They are lent until the receiver has read them.
"""

from collections.abc import Collection, Sequence

from contract.errors import ErrorKind, InvalidRequestError
from contract.requests import EngineRequest
from engine.connector import FirstToken, SenderConnector
from engine.scheduling.blocks.block_pool import BlockPool, blocks_needed
from engine.scheduling.requests.finish import Finish
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.request_index import RequestIndex
from engine.scheduling.requests.status import RequestStatus
from engine.scheduling.requests.stopping import ends_with_first_token, ends_with_next_token

NOT_NEEDED_KIND = "not_needed"
"""The kind of a transfer that ended because the first token was the whole answer; no error."""


def lease_holder(key: str) -> str:
    """Return the BlockPool's holder of blocks that a finished request still lends."""
    return f"lease:{key}"


class KVSender:
    """Lends the blocks of prefill legs, from the first ``publish`` until the connector reports that no reader is left.

    While the request runs, it holds its blocks; when it finishes, their references pass to its lease. A request that is
    handed off while it decodes is computed already: its blocks pass to the lease of the attempt that continues it at once,
    and the transfer finishes when the ranks have been ordered to publish them.
    """

    def __init__(self, connector: SenderConnector, pool: BlockPool, max_length: int) -> None:
        self._connector = connector
        self._pool = pool
        self._max_length = max_length
        self._open: set[str] = set()
        self._leases = RequestIndex()
        self._handed_off: dict[str, FirstToken] = {}

    @property
    def leases(self) -> Collection[str]:
        """Keys of finished requests whose blocks are still lent."""
        return self._leases.keys

    def lends_under(self, asked: EngineRequest) -> bool:
        """Return whether a finished request still lends its blocks under the same transfer and attempt."""
        return self._leases.uses_transfer(asked)

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Order the ranks to publish up to ``num_computed_tokens``, after the next forward pass.

        The first call lends the blocks of the whole prompt. If the answer ends with its first token anyway, nothing is
        published, not even cached blocks: the receiver would read for nothing.
        """
        is_needed = not ends_with_first_token(request, self._max_length)
        if request.key not in self._open:
            self._open.add(request.key)
            blocks = self._pool.table_of(request.key)
            num_cached = request.num_computed_tokens
            self._connector.open_send(request.asked, blocks, num_cached if is_needed else 0)
        if is_needed:
            self._connector.publish(request.key, num_computed_tokens)

    def finish(self, request: Request, first_tokens: Sequence[FirstToken]) -> None:
        """Send the first token of each choice: the prompt is computed, and the receiver continues."""
        self._connector.finish_send(request.key, list(first_tokens))
        self._lease(request)

    def abandon(self, request: Request, finish: Finish) -> bool:
        """Abandon the transfer of a request that finishes: it ended here, by its first token, an error or an abort.

        Returns False if the request has lent no blocks, or its transfer is finished already.
        """
        if request.key not in self._open:
            return False
        if finish.error_kind is not None:
            kind = finish.error_kind
        elif finish.status is RequestStatus.FINISHED_ABORTED:
            kind = ErrorKind.CANCELLED.value
        else:
            kind = NOT_NEEDED_KIND
        message = finish.error_message or f"the prefill leg ended: {kind}"
        self._connector.abandon_send(request.key, kind, message)
        self._lease(request)
        return True

    def hand_off(self, request: Request, continuation: EngineRequest) -> None:
        """Lend the KV of a request that decodes: of all its tokens but the newest, which ``continuation`` begins with.

        Raises InvalidRequestError if the next token ends the answer anyway.
        """
        if ends_with_next_token(request, self._max_length):
            raise InvalidRequestError(f"request {request.key} is not handed off: one token of it is left")
        num_tokens = len(continuation.prompt_token_ids)
        blocks = self._pool.table_of(request.key)[: blocks_needed(num_tokens, self._pool.block_size)]
        self._connector.open_send(continuation, blocks, num_tokens)
        self._handed_off[continuation.key] = FirstToken(request.token_ids[-1])
        self._leases.add(continuation, set())
        self._pool.hand_over(request.key, lease_holder(continuation.key))

    def finish_handed_off(self) -> None:
        """Send the newest tokens of requests that were handed off; the ranks have the orders to publish their blocks."""
        for key, token in self._handed_off.items():
            self._connector.finish_send(key, [token])
        self._handed_off.clear()

    def end_leases(self, keys: Collection[str]) -> None:
        """Free the blocks of these requests, which have no reader any more (``finished_sending``)."""
        for key in keys:
            if self._leases.discard(key):
                self._pool.free(lease_holder(key))

    def withdraw(self, request_id: str, up_to_attempt: int | None, choice: int | None) -> None:
        """Abandon what finished legs of a cancelled request still lend. Their leases end like all others.

        A leg that serves several choices is abandoned when all of them are cancelled.
        """
        for key in self._leases.dismiss(request_id, up_to_attempt, choice):
            self._handed_off.pop(key, None)
            self._connector.abandon_send(key, ErrorKind.CANCELLED, "the request was cancelled")

    def _lease(self, request: Request) -> None:
        self._open.remove(request.key)
        self._leases.add(request.asked, request.dismissed)
        self._pool.hand_over(request.key, lease_holder(request.key))
