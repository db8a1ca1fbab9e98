"""The rules of a hand-over: pure functions, no I/O and no clock. Production runs exactly these.

``advance_send`` and ``advance_fetch`` take a transfer and what happened and return the transfer afterwards and what has
to be done now, in order. Every change of state is checked against ``SEND_EDGES`` / ``FETCH_EDGES``. An event is
*dropped* (nothing changes, nothing to do) where correct processes can race: the sender's words after the receiver ended
the transfer, a second fetch by the same peer, a peer that does not hold the lease. Any other event that does not fit
raises ImpossibleEventError.
"""

from kv_transfer.protocol.transitions.fetch import advance_fetch
from kv_transfer.protocol.transitions.send import advance_send

__all__ = ["advance_fetch", "advance_send"]
