"""The tokens of one rank's step: the same on every rank."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine.compute.forward import ForwardPass
from engine.compute.inputs import IntVector
from engine.compute.staging import on_device
from engine.distributed.group import RankGroup
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import Samples, Sampling, begin_sampling
from engine.sampling.sampling_batch import Drawing


class RankSampler:
    """Turns hidden states into logits, and logits into tokens. Rank 0 samples, and shares the tokens with the others.

    Counts of NaN and log probabilities are known to rank 0 only.
    """

    def __init__(self, forward: ForwardPass, group: RankGroup, device: torch.device) -> None:
        self._forward = forward
        self._group = group
        self._device = device

    @property
    def is_first(self) -> bool:
        """True on the rank that returns a step's results."""
        return self._group.rank == 0

    def logits(self, hidden: Tensor, rows: IntVector) -> Tensor:
        """Return the logits ``[len(rows), vocab_size]`` of these tokens of the step (whole on rank 0 only)."""
        if len(rows) == hidden.shape[0]:  # in order, as they always are
            return self._forward.logits(hidden)
        (indices,) = on_device([rows], self._device)
        return self._forward.logits(hidden[indices])

    def begin_step(self, logits: Tensor, drawing: Drawing) -> Sampling:
        """Begin to sample a step's tokens: the best ones if all rows take them and they are known already, else by row."""
        best = self._forward.best_tokens(logits) if drawing.takes_best else None
        return best or self.begin_rows(_repeated(logits, drawing.places), drawing.rows)

    def begin_rows(self, logits: Tensor, rows: list[SamplingRow]) -> Sampling:
        """Begin to sample one token for each row."""
        if self._group.rank == 0:
            sampling = begin_sampling(logits, rows, self._forward.draw)
        else:
            sampling = Sampling(partial(_unknown, len(rows)))
        return sampling if self._group.size == 1 else Sampling(partial(self._shared, sampling))

    def _shared(self, sampling: Sampling) -> Samples:
        samples = sampling.read()
        return replace(samples, token_ids=self._group.share_tokens(samples.token_ids))


def _unknown(num_rows: int) -> Samples:
    return Samples([None] * num_rows, [0] * num_rows, None)


def _repeated(logits: Tensor, places: IntVector | None) -> Tensor:
    """Return each row as often as tokens are sampled from it."""
    if places is None:
        return logits
    (indices,) = on_device([places], logits.device)
    return logits[indices]
