"""Experts of transformers' modules that are spread over ranks give the numbers of one rank that has all of them."""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contract.errors import SettingError
from engine.models.served import examine
from engine.models.spread_experts import spread
from tests.checkpoints import write_checkpoint
from tests.fakes.engine.local_ranks import Exchange
from tests.families.tiny_models import make_tiny

PROMPTS = [[5, 6, 7, 8, 9, 10, 1, 2, 3], [3], [11, 12, 13, 14]]
"""The prompt of each rank."""


class ThreadExchange:
    """A TokenExchange between threads."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank = rank
        self.size = exchange.size
        self._exchange = exchange
        self._counts: list[int] = []

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        of_ranks = self._exchange.exchange(self.rank, parts)
        self._counts = [len(own[0]) for own in of_ranks]
        return [torch.cat(part) for part in zip(*of_ranks, strict=True)]

    def add_up_own(self, states: Tensor) -> Tensor:
        total: Tensor = sum(self._exchange.exchange(self.rank, states))
        start = sum(self._counts[: self.rank])
        return total[start : start + self._counts[self.rank]]

    def close(self) -> None:
        """Leave nothing."""


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "nemotron_h", "kimi_linear", "gpt_oss", "mixtral"])
def test_each_rank_gets_the_logits_of_the_whole(family: str) -> None:
    """Three ranks, whose shares of the experts and of the tokens differ."""
    torch.manual_seed(0)
    whole = make_tiny(family)
    exchange = Exchange(len(PROMPTS))

    def logits(rank: int) -> Tensor:
        with torch.inference_mode():
            model = copy.deepcopy(whole)
            spread(model, ThreadExchange(rank, exchange), family)
            assert sum(map(torch.numel, model.parameters())) < sum(map(torch.numel, whole.parameters()))
            found: Tensor = model(input_ids=torch.tensor([PROMPTS[rank]]), use_cache=False).logits
            return found

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        of_ranks = list(threads.map(logits, range(len(PROMPTS))))
    with torch.inference_mode():
        for prompt, found in zip(PROMPTS, of_ranks, strict=True):
            expected = whole(input_ids=torch.tensor([prompt]), use_cache=False).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_experts_in_other_modules_are_refused(tmp_path: Path) -> None:
    """The check refuses them, too, before a start has read all weights."""
    folder = write_checkpoint(tmp_path / "jetmoe", make_tiny("jetmoe"), 3)
    with pytest.raises(SettingError, match="the model has no experts that can be spread over the ranks"):
        examine(folder, data_parallel_size=2)
    folder = write_checkpoint(tmp_path / "nemotron_h", make_tiny("nemotron_h"), 3)
    served = examine(folder, data_parallel_size=2)
    assert served.num_weight_bytes is not None
    assert 0 < served.num_expert_bytes < served.num_weight_bytes
    with pytest.raises(SettingError, match="its experts cannot be spread over data-parallel ranks"):
        spread(make_tiny("jetmoe"), ThreadExchange(0, Exchange(2)), "JetMoeForCausalLM")
