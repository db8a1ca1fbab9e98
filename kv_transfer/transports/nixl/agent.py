"""One agent of the NIXL library. It is called by one thread at a time (``nixl_thread``).

The back end is UCX in peer error mode, in which a peer's death is an exception; the other mode is silent for ever. The
library's progress thread is off on every machine: it spins on a core even when idle.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from contract.errors import KvbatonError, PeerUnreachableError, SettingError, TransferError
from kv_transfer.protocol.reads import BlockPart
from kv_transfer.transports.nixl.binding import NixlLibrary
from kv_transfer.transports.nixl.memory import Region

logger = logging.getLogger(__name__)
_SELF = "NIXL_INIT_AGENT"
_MAX_PARTS = 256


class NixlAgent:
    """Owns the library's agent. Methods raise PeerUnreachableError where the peer is gone, TransferError for the rest."""

    def __init__(self, library: NixlLibrary, name: str) -> None:
        """Bring it up. Raises SettingError."""
        self._library = library
        self._num_users: Counter[str] = Counter()
        api = library.api
        errors: tuple[type[Exception], ...] = (RuntimeError, *library.errors)
        try:
            config = api.nixl_agent_config(
                enable_prog_thread=False,
                backends=[],
                sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            self._agent: Any = api.nixl_agent(name, config)
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        except errors as error:
            raise SettingError(
                f"transport nixl is not possible here: UCX does not come up ({error!r}); choose auto, shm or tcp",
                param="transport",
            ) from error

    def register(self, region: Region) -> Any:
        """Make a region readable for peers that get ``metadata`` from now on, and for this agent to read into."""
        with self._telling("registering memory"):
            row = (region.address, region.num_bytes, region.device_id, "")
            return self._agent.register_memory([row], region.memory_type)

    def deregister(self, registration: Any) -> None:
        """End that."""
        with self._telling("deregistering memory"):
            self._agent.deregister_memory(registration)

    def metadata(self) -> bytes:
        """What a peer needs to read what is registered now."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def describe(self, region: Region, peer: str = _SELF, part: BlockPart | None = None) -> Any:
        """A region's blocks, or the part of each, for ``prepare``: one strided row where the library knows such.

        Else a row for each.
        """
        with self._telling("describing memory"):
            try:
                return self._agent.prep_xfer_dlist(peer, region.strided_row(part), region.memory_type)
            except (TypeError, ValueError, AttributeError):
                return self._agent.prep_xfer_dlist(peer, region.rows(part), region.memory_type)

    def undescribe(self, blocks: Any) -> None:
        """Give that back."""
        with self._telling("releasing descriptors"):
            self._agent.release_dlist_handle(blocks)

    def add_peer(self, metadata: bytes, name: str) -> None:
        """Know a peer, which must have this name. Does not wait for it. Each call needs a ``remove_peer``."""
        with self._telling(f"adding {name}"):
            found = self._agent.add_remote_agent(metadata)
            found = found.decode() if isinstance(found, bytes) else found
            if found != name:
                raise TransferError(f"the peer's agent is {found}; it should be {name}")
            self._num_users[name] += 1
            self._agent.make_connection(name)

    def remove_peer(self, name: str) -> None:
        """The last of them disconnects it."""
        self._num_users[name] -= 1
        if self._num_users[name]:
            return
        del self._num_users[name]
        with self._telling(f"removing {name}"):
            self._agent.remove_remote_agent(name)

    def prepare(
        self, local: Any, local_ids: npt.NDArray[np.int32], remote: Any, remote_ids: npt.NDArray[np.int32]
    ) -> Any:
        """A read of remote blocks into local ones, to be posted."""
        try:
            return self._agent.make_prepped_xfer("READ", local, local_ids, remote, remote_ids)
        except self._library.errors as error:
            raise self._failed("preparing a read", error) from error

    def post(self, handle: Any) -> bool:
        """Begin a read; True when it is done already."""
        try:
            return _is_done(self._agent.transfer(handle))
        except self._library.errors as error:
            raise self._failed("a read", error) from error

    def is_done(self, handle: Any) -> bool:
        """Drive it on; True when every byte is in place."""
        try:
            return _is_done(self._agent.check_xfer_state(handle))
        except self._library.errors as error:
            raise self._failed("a read", error) from error

    def release(self, handle: Any) -> None:
        """Give the handle of a terminal read back."""
        try:
            self._agent.release_xfer_handle(handle)
        except self._library.errors as error:
            raise self._failed("releasing a read", error) from error

    def progress(self) -> None:
        """Drive on what peers do with this agent."""
        with self._telling("serving peers"):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """End the library's agent: nothing that was posted can land any more. The last call."""
        self._agent = None

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Within, what the library raises becomes an error of ours. What every read does has no generator around it."""
        try:
            yield
        except self._library.errors as error:
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: Exception) -> KvbatonError:
        if isinstance(error, self._library.disconnected):
            return PeerUnreachableError(f"nixl: {what} failed: the peer is gone")
        return TransferError(f"nixl: {what} failed: {error!r}")


class DescribedRegion:
    """A region's blocks as ``NixlAgent.prepare`` wants them, whole or a part of each. One thread at a time uses it.

    peer: whose memory it is; this process's own without one.
    """

    def __init__(self, agent: NixlAgent, region: Region, peer: str = _SELF) -> None:
        self._agent = agent
        self._region = region
        self._peer = peer
        self._by_part: dict[BlockPart | None, Any] = {None: agent.describe(region, peer)}

    def blocks(self, part: BlockPart | None = None) -> Any:
        """Described once for each part. Raises TransferError for one that no block has, or one too many."""
        if part not in self._by_part:
            if len(self._by_part) > _MAX_PARTS:
                raise TransferError(f"nixl: blocks are read in {_MAX_PARTS} different parts already")
            self._by_part[part] = self._agent.describe(self._region, self._peer, part)
        return self._by_part[part]

    def give_back(self) -> None:
        """No read needs it any more. Raises TransferError."""
        with ExitStack() as undo:
            for blocks in self._by_part.values():
                undo.callback(self._agent.undescribe, blocks)


def _is_done(state: str) -> bool:
    if state == "ERR":
        raise TransferError("nixl: a read ended in an error")
    return state == "DONE"
