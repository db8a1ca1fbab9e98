"""The environment of the NIXL library, set before it is loaded, and the devices that it can use."""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from contract.errors import TransferError

logger = logging.getLogger(__name__)
_RDMA_DEVICES = Path("/sys/class/infiniband")
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# The second one is that of WSL2, which has no driver of its own in the kernel.
_NVIDIA_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libcuda.so.1"))


_ANY_LANES = frozenset({"all", "tcp"})
# Names of UCX's lanes that need an RDMA card begin so.
_RDMA_LANES = ("ib", "rc", "ud", "dc")


def has_rdma_device(folder: Path = _RDMA_DEVICES) -> bool:
    """Return True if a network card here can read another machine's memory."""
    return folder.is_dir() and any(folder.iterdir())


def has_nvidia_gpu(drivers: Sequence[Path] = _NVIDIA_DRIVERS) -> bool:
    """Return True if the driver is loaded, whether the KV pool is on a GPU or not."""
    return any(driver.exists() for driver in drivers)


def prepare_ucx(host: str) -> None:
    """Restrict UCX, which ``nixl`` uses, to ``host``'s interface, and its log to standard error.

    UCX opens ports of its own without authentication. Without an RDMA card its verbs modules are left out: where the
    system's verbs library is installed they crash the process at its exit. Between GPUs without an NVLink that UCX sees, it
    reads through CUDA IPC only if it is allowed to, else by TCP through the host. Variables that are set already win.
    """
    defaults = {"UCX_LOG_FILE": "stderr", "NIXL_LOG_LEVEL": "WARN", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}
    if not has_rdma_device():
        defaults["UCX_MODULES"] = "^ib"
        interface = interface_of(host)
        if interface is not None:
            defaults["UCX_NET_DEVICES"] = interface
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    lanes = os.environ.get("UCX_TLS", "")
    if (wider := with_host_lane(lanes, has_rdma=has_rdma_device())) != lanes:
        os.environ["UCX_TLS"] = wider
        logger.warning(
            "UCX_TLS is %r, by which no other machine's host memory can be read, as the first read of each peer needs; this "
            "process takes %r",
            lanes,
            wider,
        )
    logger.info(
        "UCX opens ports of its own on %s (UCX_NET_DEVICES)", os.environ.get("UCX_NET_DEVICES", "all devices")
    )


def with_host_lane(lanes: str, *, has_rdma: bool) -> str:
    """Return the value of UCX_TLS ``lanes``, with tcp if no lane of it reads host memory of another machine.

    lanes: names separated by commas; behind a "^" those that are left out; empty: all of them. The generation of a lease is
    in host memory, also if the pool is on a GPU, and shared memory does not reach other machines.
    """
    is_exclusion = lanes.startswith("^")
    names = [name for name in lanes.removeprefix("^").split(",") if name]
    known = {name.strip().lower().lstrip("\\") for name in names}
    if is_exclusion:
        is_rdma_left = has_rdma and not any(name.startswith(_RDMA_LANES) for name in known)
        if not known & _ANY_LANES or is_rdma_left:
            return lanes
        kept = [name for name in names if name.strip().lower().lstrip("\\") not in _ANY_LANES]
        return "^" + ",".join(kept) if kept else "all"
    is_enough = bool(known & _ANY_LANES) or (has_rdma and any(name.startswith(_RDMA_LANES) for name in known))
    return lanes if is_enough or not names else f"{lanes},tcp"


def require_whole_allocations(environment: Mapping[str, str] = os.environ) -> None:
    """Raise TransferError if torch's allocator takes a GPU's memory in expandable segments.

    A pool in such memory consists of many small mappings, and CUDA IPC cannot hand it to another process.
    """
    for name in _ALLOCATOR_VARIABLES:
        options = environment.get(name, "").replace(" ", "").lower().split(",")
        if "expandable_segments:true" in options:
            raise TransferError(
                f"{name} sets expandable_segments, and CUDA IPC cannot read such memory; unset it"
            )


def interface_of(host: str) -> str | None:
    """Return the network interface with this address (or this name's); None if there is none, as for a wildcard."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] in found for address in addresses):
            return interface
    return None
