"""What libraries of transports read from the environment, set before they are loaded."""

import logging
import os
import socket
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)
_RDMA_DEVICES = Path("/sys/class/infiniband")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def has_rdma_device(folder: Path = _RDMA_DEVICES) -> bool:
    """This machine has a network card that can read another machine's memory."""
    return folder.is_dir() and any(folder.iterdir())


def has_nvidia_gpu(driver: Path = _NVIDIA_DRIVER) -> bool:
    """The driver is loaded; whether the KV pool lies on a GPU is another question."""
    return driver.exists()


def prepare_ucx(host: str) -> None:
    """Keep UCX, below ``nixl``, to ``host``'s interface, and its words out of standard output.

    UCX opens ports of its own, which authenticate nobody. Without an RDMA card its verbs modules are left out: where
    the system's verbs library is installed they crash the process at its exit. What the environment says already wins.
    """
    defaults = {"UCX_LOG_FILE": "stderr", "NIXL_LOG_LEVEL": "WARN"}
    if not has_rdma_device():
        defaults["UCX_MODULES"] = "^ib"
        interface = interface_of(host)
        if interface is not None:
            defaults["UCX_NET_DEVICES"] = interface
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    logger.info(
        "UCX opens ports of its own on %s (UCX_NET_DEVICES)", os.environ.get("UCX_NET_DEVICES", "all devices")
    )


def interface_of(host: str) -> str | None:
    """The network interface with this address (or this name's); None where none has it, as for a wildcard."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] in found for address in addresses):
            return interface
    return None
