"""A GPU's pool in expandable segments is not offered by nixl: CUDA IPC cannot hand such memory to another process."""

from types import SimpleNamespace

import pytest
import torch

from contract.errors import TransferError
from kv_transfer.transports.nixl.agent import Region
from kv_transfer.transports.nixl.sender import region_of
from kv_transfer.transports.nixl.settings import require_whole_allocations
from tests.kv_transfer.device_memory import FakeDevice


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    "value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments:true"]
)
def test_expandable_segments_are_named(name: str, value: str) -> None:
    with pytest.raises(TransferError, match=f"{name} sets expandable_segments"):
        require_whole_allocations({name: value})


@pytest.mark.parametrize("value", ["", "expandable_segments:False", "max_split_size_mb:64"])
def test_other_allocators_are_accepted(value: str) -> None:
    require_whole_allocations({"PYTORCH_CUDA_ALLOC_CONF": value})
    require_whole_allocations({})


def test_only_a_pool_of_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport is then not offered, for this reason; memory of the host is no concern of this allocator."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    memory = FakeDevice()
    assert region_of(memory) == Region(memory.address, memory.layout.block_bytes, memory.num_blocks)
    on_gpu = SimpleNamespace(device=torch.device("cuda", 1), data_ptr=lambda: 4096)
    monkeypatch.setattr(memory, "pool", on_gpu)
    with pytest.raises(TransferError, match="CUDA IPC cannot read such memory"):
        region_of(memory)
