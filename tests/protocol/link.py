"""A control link of the explored world: two queues of frames, and the sides that have not seen its end."""

from typing import NamedTuple


class Link(NamedTuple):
    """Between one incarnation of a decode worker, which dialed, and one of a prefill worker.

    is_up: the handshake is complete. is_cut: nothing arrives any more. knows_prefill, knows_decode: that side has not seen
    the link's end.
    """

    decode: str
    prefill: str
    to_prefill: tuple[bytes, ...] = ()
    to_decode: tuple[bytes, ...] = ()
    is_up: bool = False
    is_cut: bool = False
    knows_prefill: bool = False
    knows_decode: bool = True

    @property
    def is_forgotten(self) -> bool:
        """True if both sides have seen its end."""
        return not self.knows_prefill and not self.knows_decode

    def cut(self) -> "Link":
        """Return the link without its frames, cut."""
        return self._replace(is_cut=True, to_prefill=(), to_decode=())
