"""The NIXL library: how it is loaded, the regions of memory that it reads and writes, and one agent of it.

The agent is called by one thread at a time (``nixl_thread``). The back end is UCX in peer error mode, in which a peer's
death is an exception; in the other mode it is never reported. The library's progress thread is off on every machine: it
uses a whole core even when idle.
"""

import importlib
import importlib.util
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from contract.errors import PeerUnreachableError, SettingError, TransferError
from kv_transfer.protocol.reads import BlockPart
from kv_transfer.transports.block_views import BlockViews, LandingViews, address_of, block_span
from kv_transfer.transports.nixl.settings import prepare_ucx

logger = logging.getLogger(__name__)
SELF = "NIXL_INIT_AGENT"
_MODULES = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")
_MISSING = "transport nixl needs the NIXL library: pip install 'kvbaton[nixl]', or choose auto, shm or tcp"


@dataclass(frozen=True)
class NixlLibrary:
    """The loaded library. errors: everything that its calls raise. disconnected: the one of these for a lost peer."""

    api: Any
    errors: tuple[type[Exception], ...]
    disconnected: type[Exception]


def why_missing(modules: Sequence[str] = _MODULES) -> str | None:
    """Return what to install, or None if a build of the library is found. Loads nothing."""
    return None if _installed(modules) else _MISSING


def load(host: str, modules: Sequence[str] = _MODULES) -> NixlLibrary:
    """Load the first build of the library that is installed. Raises SettingError. host: see ``prepare_ucx``."""
    module = _installed(modules)
    if module is None:
        raise SettingError(_MISSING, param="transport")
    prepare_ucx(host)
    raises = logging.raiseExceptions
    try:
        api: Any = importlib.import_module(module)
    except ImportError as error:
        raise SettingError(
            f"the NIXL library cannot be loaded: {error}; repair it, or choose auto, shm or tcp",
            param="transport",
        ) from error
    finally:
        # Its changes to logging are undone: a handler on standard output, and silence about broken handlers.
        logging.raiseExceptions = raises
        nixl_logger = logging.getLogger("nixl")
        nixl_logger.handlers.clear()
        nixl_logger.propagate = True
        nixl_logger.setLevel(logging.WARNING)
    bindings = api.nixlBind
    names = [name for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    errors = tuple(getattr(bindings, name) for name in names)
    return NixlLibrary(api, errors, bindings.nixlRemoteDisconnectError)


def _installed(modules: Sequence[str]) -> str | None:
    return next((each for each in modules if importlib.util.find_spec(each.partition(".")[0])), None)


_END_OF_MEMORY = 2**63
Ids = npt.NDArray[np.int32]
# The library counts blocks by 32 bits.
ID_TYPE = np.dtype(np.int32)
_MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class Region:
    """Blocks that lie side by side in memory."""

    address: int
    block_bytes: int
    num_blocks: int
    is_device: bool = False
    device_id: int = 0

    @property
    def num_bytes(self) -> int:
        """The size of all blocks."""
        return self.block_bytes * self.num_blocks

    @property
    def memory_type(self) -> str:
        """The library's name for this kind of memory."""
        return "VRAM" if self.is_device else "DRAM"

    def check(self) -> None:
        """Raise TransferError for numbers that cannot be memory."""
        is_positive = min(self.address, self.block_bytes, self.num_blocks) > 0 and self.device_id >= 0
        is_too_large = self.num_blocks > _MAX_BLOCKS or self.address + self.num_bytes >= _END_OF_MEMORY
        if is_too_large or not is_positive:
            raise TransferError(
                f"{self.num_blocks} blocks of {self.block_bytes} bytes at {self.address} are not memory"
            )

    def find(self, views: Sequence[memoryview], part: BlockPart | None = None) -> Ids | None:
        """Return the blocks that the writable ``views`` are, or are this part of; None if one is not in this region."""
        if isinstance(views, BlockViews | LandingViews):
            is_here = views.address == self.address and views.num_pool_bytes <= self.num_bytes
            is_same = views.block_bytes == self.block_bytes and views.part == part
            return views.ids.astype(ID_TYPE) if is_here and is_same else None
        (start, end) = block_span(self.block_bytes, part)
        found = list[int]()
        for view in views:
            number, offset = divmod(address_of(view) - self.address, self.block_bytes)
            if offset != start or view.nbytes != end - start or not 0 <= number < self.num_blocks:
                return None
            found.append(number)
        return np.array(found, ID_TYPE)


class NixlAgent:
    """Owns the library's agent. Methods raise PeerUnreachableError if the peer is gone, else TransferError.

    undo: a method that takes it adds the call that reverses what the method did.
    """

    def __init__(self, library: NixlLibrary, name: str) -> None:
        self._library = library
        self._name = name
        self._num_users: Counter[str] = Counter()
        self._agent: Any = None

    def start(self) -> None:
        """Start it; called once, first. Raises SettingError."""
        api = self._library.api
        errors: tuple[type[Exception], ...] = (RuntimeError, *self._library.errors)
        try:
            config = api.nixl_agent_config(
                enable_prog_thread=False,
                backends=[],
                sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            self._agent = api.nixl_agent(self._name, config)
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        except errors as error:
            raise SettingError(
                f"transport nixl is not possible here: UCX does not start ({error!r}); choose auto, shm or tcp",
                param="transport",
            ) from error

    def register(self, region: Region, undo: ExitStack) -> None:
        """Register a region for this agent to read into, and for peers that get ``metadata`` from now on to read.

        For memory of a device, this thread enters the device's context for good: the library copies there.
        """
        if region.is_device:
            import torch

            torch.zeros(1, device=torch.device("cuda", region.device_id))
        row = (region.address, region.num_bytes, region.device_id, "")
        registered = self._call("registering memory", "register_memory", [row], region.memory_type)
        undo.callback(self._call, "deregistering memory", "deregister_memory", registered)

    def metadata(self) -> bytes:
        """Return what a peer needs to read the regions that are registered now."""
        found: bytes = self._call("describing this agent", "get_agent_metadata")
        return found

    def describe(self, region: Region, peer: str, part: BlockPart | None, undo: ExitStack) -> Any:
        """Describe a region's blocks, or the part of each, for ``prepare``. peer: whose they are, or SELF."""
        start, end = block_span(region.block_bytes, part)
        # One row for all blocks: where the first one begins, length, device, stride and count.
        row = (region.address + start, end - start, region.device_id, region.block_bytes, region.num_blocks)
        rows = np.array([row], np.uint64)
        blocks = self._call("describing memory", "prep_xfer_dlist", peer, rows, region.memory_type)
        undo.callback(self._call, "releasing descriptors", "release_dlist_handle", blocks)
        return blocks

    def add_peer(self, metadata: bytes, name: str, undo: ExitStack) -> None:
        """Add a peer, which must have this name. Does not wait for it. The last undo disconnects it."""
        found = self._call(f"adding {name}", "add_remote_agent", metadata)
        found = found.decode() if isinstance(found, bytes) else found
        if found != name:
            raise TransferError(f"the peer's agent is {found}; it should be {name}")
        self._call(f"adding {name}", "make_connection", name)
        self._num_users[name] += 1
        undo.callback(self._remove_peer, name)

    def prepare(self, local: Any, local_ids: Ids, remote: Any, remote_ids: Ids) -> Any:
        """Prepare a read of remote blocks into local ones, to be posted."""
        sides = (local, local_ids, remote, remote_ids)
        return self._call("preparing a read", "make_prepped_xfer", "READ", *sides)

    def post(self, handle: Any) -> bool:
        """Begin a read; return True if it is done already."""
        return self._is_done("transfer", handle)

    def is_done(self, handle: Any) -> bool:
        """Let a posted read progress; return True when every byte is in place."""
        return self._is_done("check_xfer_state", handle)

    def release(self, handle: Any) -> None:
        """Release the handle of a terminal read."""
        self._call("releasing a read", "release_xfer_handle", handle)

    def progress(self) -> None:
        """Let the reads of peers progress."""
        self._call("serving peers", "get_new_notifs")

    def close(self) -> None:
        """End the library's agent: nothing that was posted can land any more."""
        self._agent = None

    def _remove_peer(self, name: str) -> None:
        self._num_users[name] -= 1
        if not self._num_users[name]:
            del self._num_users[name]
            self._call(f"removing {name}", "remove_remote_agent", name)

    def _is_done(self, method: str, handle: Any) -> bool:
        state = self._call("a read", method, handle)
        if state == "ERR":
            raise TransferError("nixl: a read ended in an error")
        return bool(state == "DONE")

    def _call(self, what: str, method: str, *arguments: Any) -> Any:
        """Call a method of the library's agent, and replace its errors by ours."""
        if self._agent is None:
            raise TransferError("the NIXL agent is closed")
        try:
            return getattr(self._agent, method)(*arguments)
        except self._library.disconnected as error:
            raise PeerUnreachableError(f"nixl: {what} failed: the peer is gone") from error
        except self._library.errors as error:
            raise TransferError(f"nixl: {what} failed: {error!r}") from error
