"""`make gpu-check`: collectives of a group over NCCL that one GPU can form, a group of one rank, alone and in a graph."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from engine.compute.best_tokens import BestOfRanks
from engine.compute.forward import best_tokens_on_cuda
from engine.compute.recording import CudaRecorder
from engine.distributed.process_group import TorchRankGroup, listen_for_ranks, open_store

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CUDA = torch.device("cuda", 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def group() -> Iterator[TorchRankGroup]:
    torch.cuda.set_device(CUDA)
    listening = listen_for_ranks()
    port = listening.getsockname()[1]
    made = TorchRankGroup(CUDA, 0, 1, open_store(listening, port, 1), timedelta(seconds=60))
    yield made
    made.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_run_on_the_current_stream(group: TorchRankGroup, dtype: torch.dtype) -> None:
    part = torch.arange(24, device=CUDA, dtype=dtype).view(4, 6)
    expected = part.clone()
    assert torch.equal(group.add_up(part.clone()), expected)
    assert torch.equal(group.gather_columns(part.clone(), 6), expected)
    assert torch.equal(group.share(part.clone()), expected)
    assert group.gather_columns(part[:0], 6).shape == (0, 6)
    keys = torch.tensor([2**62 + 1, 0, 1], device=CUDA)
    assert group.highest(keys.clone()).tolist() == keys.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_are_captured_and_replayed(group: TorchRankGroup, dtype: torch.dtype) -> None:
    """Each replay works on what its input holds now; all collectives are in the graph, best tokens too."""
    given = torch.zeros(3, 8, device=CUDA, dtype=dtype)
    best = torch.zeros(3, 2, dtype=torch.int64, device=CUDA)
    find_best = BestOfRanks(group, 8, best_tokens_on_cuda())

    def run() -> torch.Tensor:
        total = group.add_up(given + 1)
        find_best(total, best)
        return group.share(group.gather_columns(total * 2, 8))

    recording = CudaRecorder(CUDA).record(run)
    for number in (0, 3, 7):
        given.fill_(number)
        given[:, number] = 9
        recording.replay()
        assert best.tolist() == [[number, 1]] * 3
        given.fill_(number)
        recording.replay()
        assert torch.equal(recording.output, torch.full_like(given, 2 * (number + 1)))
