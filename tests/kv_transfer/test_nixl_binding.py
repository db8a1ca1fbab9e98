"""The conditions of ``nixl``: when it is installed, when ``auto`` offers it, its environment and its regions."""

import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import SettingError
from kv_transfer.links.listening import listen_on
from kv_transfer.transports.block_views import BlockViews, address_of
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.nixl.agent import Region, load, why_missing
from kv_transfer.transports.nixl.sender import NixlSender
from kv_transfer.transports.nixl.settings import (
    has_nvidia_gpu,
    has_rdma_device,
    interface_of,
    with_host_lane,
)
from kv_transfer.transports.registry import auto_names
from tests.chaos.settings import process_environment
from tests.kv_transfer.fakes import ByteMemory
from tests.kv_transfer.nixl_port import LAYOUT, context_for
from tests.leftovers import Leftovers


def test_views_are_known_as_blocks_of_the_pool_or_not_at_all() -> None:
    """Many at once by their numbers, single ones by their addresses."""
    pool, other = memoryview(bytearray(4096)), memoryview(bytearray(4096))
    region = Region(address_of(pool), 512, 8)
    for views in (BlockViews(pool, 512, [3, 1]), list(BlockViews(pool, 512, [3, 1]))):
        found = region.find(views)
        assert found is not None
        assert found.tolist() == [3, 1]
    assert region.find(BlockViews(other, 512, [3])) is None
    assert region.find(BlockViews(pool, 256, [3])) is None
    assert region.find([pool[:512], other[:512]]) is None
    assert region.find([pool[256:768]]) is None


@pytest.mark.parametrize(("can_be_best", "names"), [(True, ("shm", "nixl", "tcp")), (False, ("shm", "tcp"))])
def test_auto_prefers_it_to_tcp_only_where_it_may_be_faster(
    can_be_best: bool, names: tuple[str, ...]
) -> None:
    assert auto_names(can_be_best) == names


def test_under_auto_a_pool_in_host_memory_without_an_rdma_card_is_not_offered() -> None:
    """The devices are known before, the place of the pool only at ``start``."""
    sender = NixlSender(context_for("auto", Sessions(), [], transport="auto"), load("127.0.0.1"))
    assert sender.why_not_offered == "the pool is not allocated yet"
    sender.start(ByteMemory(LAYOUT, 4))
    expected = (
        None
        if has_rdma_device()
        else "the KV pool is in host memory and there is no RDMA card, so tcp is faster"
    )
    assert sender.why_not_offered == expected
    sender.close()
    sender.close()


def test_a_sender_that_cannot_open_its_port_leaves_nothing_open() -> None:
    """The table of generations has a descriptor, and the agent a thread and descriptors of its own."""
    library = load("127.0.0.1")
    with listen_on("127.0.0.1", 0) as taken:
        context = context_for("late", Sessions(), [], data_port=taken.getsockname()[1])
        leftovers = Leftovers()
        with pytest.raises(OSError, match="in use"):
            NixlSender(context, library)
        assert (leftovers.threads(), leftovers.descriptors()) == ([], set())


def test_the_devices_of_a_machine(tmp_path: Path) -> None:
    assert has_rdma_device(tmp_path / "none") is False
    assert has_rdma_device(tmp_path) is False
    (tmp_path / "mlx5_0").mkdir()
    assert has_rdma_device(tmp_path) is True
    assert has_nvidia_gpu([tmp_path / "version", tmp_path / "wsl"]) is False
    (tmp_path / "wsl").touch()
    assert has_nvidia_gpu([tmp_path / "version", tmp_path / "wsl"]) is True


@pytest.mark.parametrize(("host", "interface"), [("127.0.0.1", "lo"), ("localhost", "lo"), ("0.0.0.0", None)])
def test_the_library_keeps_to_the_interface_of_the_workers_host(host: str, interface: str | None) -> None:
    assert interface_of(host) == interface


@pytest.mark.parametrize("given", [{}, {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"}])
def test_reads_between_gpus_without_a_visible_nvlink_may_use_cuda_ipc(given: dict[str, str]) -> None:
    """UCX reads by TCP there unless it is allowed to. What an operator has set stays."""
    program = (
        "import os; from kv_transfer.transports.nixl.settings import prepare_ucx; prepare_ucx('127.0.0.1')"
    )
    program += "; print(os.environ['UCX_CUDA_IPC_ENABLE_GET_ZCOPY'])"
    environment = process_environment() | given
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == given.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y")


def test_a_missing_library_says_what_to_install() -> None:
    with pytest.raises(SettingError, match=r"pip install 'kvbaton\[nixl\]'") as caught:
        load("127.0.0.1", ("no_such_library._api", "nor_this._api"))
    assert caught.value.param == "transport"
    assert why_missing(("no_such_library._api",)) == caught.value.message
    assert why_missing(("no_such_library._api", "json")) is None


def test_a_broken_library_says_so() -> None:
    with pytest.raises(SettingError, match="cannot be loaded"):
        load("127.0.0.1", ("json.no_such_module",))


@pytest.mark.parametrize(
    ("lanes", "has_rdma", "wanted"),
    [
        ("", False, ""),
        ("all", False, "all"),
        ("tcp,cuda_copy", False, "tcp,cuda_copy"),
        ("cuda_ipc,cuda_copy", True, "cuda_ipc,cuda_copy,tcp"),
        ("cuda_ipc,cuda_copy", False, "cuda_ipc,cuda_copy,tcp"),
        ("sm,cuda", False, "sm,cuda,tcp"),
        ("rc,cuda", True, "rc,cuda"),
        ("dc_mlx5,cuda", True, "dc_mlx5,cuda"),
        ("rc,cuda", False, "rc,cuda,tcp"),
        ("\\rc,cuda", True, "\\rc,cuda"),
        ("^sm", False, "^sm"),
        ("^tcp", True, "^tcp"),
        ("^tcp", False, "all"),
        ("^tcp,sm", False, "^sm"),
        ("^tcp,rc,ud", True, "^rc,ud"),
    ],
)
def test_a_list_of_lanes_gets_one_to_host_memory(lanes: str, has_rdma: bool, wanted: str) -> None:
    """The first read of each peer is of its table of generations, in host memory."""
    assert with_host_lane(lanes, has_rdma=has_rdma) == wanted
    assert with_host_lane(wanted, has_rdma=has_rdma) == wanted


def test_the_users_lanes_are_widened_for_this_process_with_a_sentence() -> None:
    script = (
        "import logging, os; logging.basicConfig(level='WARNING');"
        "from kv_transfer.transports.nixl.settings import prepare_ucx; prepare_ucx('127.0.0.1');"
        "print(os.environ['UCX_TLS'])"
    )
    environment = process_environment() | {"UCX_TLS": "cuda_ipc"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "cuda_ipc,tcp\n"
    assert "UCX_TLS is 'cuda_ipc'" in ended.stderr and "takes 'cuda_ipc,tcp'" in ended.stderr
