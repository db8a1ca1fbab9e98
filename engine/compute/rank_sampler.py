"""The tokens of one rank's step: the same on every rank."""

from dataclasses import replace

import torch
from torch import Tensor

from engine.compute.forward import ForwardPass
from engine.compute.inputs import IntVector
from engine.compute.staging import on_device
from engine.distributed.group import RankGroup
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import Samples, sample
from engine.sampling.sampling_batch import Drawing


class RankSampler:
    """Turns hidden states into logits, and logits into tokens. Rank 0 samples, and shares the tokens with the others.

    Counts of NaN and log probabilities are known to rank 0 only.
    """

    def __init__(self, forward: ForwardPass, group: RankGroup, device: torch.device) -> None:
        self._forward = forward
        self._group = group
        self._device = device

    def logits(self, hidden: Tensor, rows: IntVector) -> Tensor:
        """Return the logits ``[len(rows), vocab_size]`` of these tokens of the step (whole on rank 0 only)."""
        if len(rows) == hidden.shape[0]:  # in order, as they always are
            return self._forward.logits(hidden)
        (indices,) = on_device([rows], self._device)
        return self._forward.logits(hidden[indices])

    def sample_step(self, logits: Tensor, drawing: Drawing) -> Samples:
        """Sample a step's tokens: the best ones if all rows take them and they are known already, else row by row."""
        best = self._forward.best_tokens(logits) if drawing.takes_best else None
        if best is not None:
            return Samples(list(best), [0] * len(best), None)
        return self.sample_rows(_repeated(logits, drawing.places), drawing.rows)

    def sample_rows(self, logits: Tensor, rows: list[SamplingRow]) -> Samples:
        """Sample one token for each row."""
        samples = sample(logits, rows, self._forward.draw) if self._group.rank == 0 else _unknown(len(rows))
        if self._group.size == 1:
            return samples
        return replace(samples, token_ids=self._group.share_tokens(samples.token_ids))


def _unknown(num_rows: int) -> Samples:
    return Samples([None] * num_rows, [0] * num_rows, None)


def _repeated(logits: Tensor, places: IntVector | None) -> Tensor:
    """Return each row as often as tokens are sampled from it."""
    if places is None:
        return logits
    (indices,) = on_device([places], logits.device)
    return logits[indices]
