"""The real NIXL library, recorded: what is posted when, and when the end is reported."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.transports.nixl.agent import NixlLibrary, load


@dataclass
class Watch:
    """seen: ("posted" or "done", the remote blocks), in order. when_done: called before the end of a read is reported.

    may_end: while it is not set no end is reported, though the bytes may have arrived. A test begins with ``clear``.
    """

    seen: list[tuple[str, list[int]]] = field(default_factory=list)
    when_done: Callable[[], None] = lambda: None
    may_end: threading.Event = field(default_factory=threading.Event)
    has_posted: threading.Event = field(default_factory=threading.Event)

    def clear(self) -> None:
        self.seen.clear()
        self.has_posted.clear()

    def watched(self) -> NixlLibrary:
        library = load("127.0.0.1")
        self.may_end.set()
        return replace(library, api=_Api(library.api, self))


class _Api:
    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def nixl_agent(self, name: str, config: Any) -> "_Agent":
        return _Agent(self._inner.nixl_agent(name, config), self._watch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(eq=False)
class _Handle:
    inner: Any
    block_ids: list[int]


class _Agent:
    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def make_prepped_xfer(
        self, word: str, local: Any, local_ids: Any, remote: Any, remote_ids: npt.NDArray[np.int32]
    ) -> _Handle:
        inner = self._inner.make_prepped_xfer(word, local, local_ids, remote, remote_ids)
        return _Handle(inner, remote_ids.tolist())

    def transfer(self, handle: _Handle) -> str:
        self._watch.seen.append(("posted", handle.block_ids))
        state = self._told(handle, self._inner.transfer(handle.inner))
        self._watch.has_posted.set()
        return state

    def check_xfer_state(self, handle: _Handle) -> str:
        return self._told(handle, self._inner.check_xfer_state(handle.inner))

    def release_xfer_handle(self, handle: _Handle) -> None:
        self._inner.release_xfer_handle(handle.inner)

    def _told(self, handle: _Handle, state: str) -> str:
        if state != "DONE":
            return state
        if not self._watch.may_end.is_set():
            return "PROC"
        self._watch.when_done()
        self._watch.seen.append(("done", handle.block_ids))
        return state
