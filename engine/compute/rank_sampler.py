"""The tokens of one rank's step: the same on every rank."""

import torch
from torch import Tensor

from engine.compute.forward import ForwardPass
from engine.compute.inputs import IntVector
from engine.compute.staging import begin_copy, on_device
from engine.distributed.group import RankGroup
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import Sampling, begin_sampling, samples_of
from engine.sampling.sampling_batch import Drawing


class RankSampler:
    """Turns hidden states into logits, and logits into tokens. Rank 0 samples, and shares the tokens with the others.

    Counts of NaN and log probabilities are known to rank 0 only.
    """

    def __init__(self, forward: ForwardPass, group: RankGroup, device: torch.device, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._forward = forward
        self._group = group
        self.device = device

    @property
    def is_first(self) -> bool:
        """True on the rank that returns a step's results."""
        return self._group.rank == 0

    def logits(self, hidden: Tensor, rows: IntVector) -> Tensor:
        """Return the logits ``[len(rows), vocab_size]`` of these tokens of the step (whole on rank 0 only)."""
        if len(rows) == hidden.shape[0]:  # in order, as they always are
            return self._forward.logits(hidden)
        (indices,) = on_device([rows], self.device)
        return self._forward.logits(hidden[indices])

    def begin_step(self, logits: Tensor, drawing: Drawing) -> Sampling:
        """Begin to sample a step's tokens: the best ones if all rows take them and they are known already, else by row."""
        best = self._forward.best_tokens(logits) if drawing.takes_best else None
        return best or self.begin_rows(_repeated(logits, drawing.places), drawing.rows)

    def begin_rows(self, logits: Tensor, rows: list[SamplingRow]) -> Sampling:
        """Begin to sample one token for each row; the tokens go from device to device."""
        if self.is_first:
            sampling = begin_sampling(logits, rows, self._forward.draw)
            self._share(sampling.drawn)
            return sampling
        drawn = torch.empty(2, len(rows), dtype=torch.int64, device=self.device)
        self._share(drawn)
        copied = begin_copy(drawn)
        return Sampling(lambda: samples_of(zip(*copied(), strict=True)), drawn)

    def _share(self, drawn: Tensor | None) -> None:
        assert drawn is not None, "the tokens are not where the logits are"
        if drawn.shape[1]:
            self._group.share(drawn)


def _repeated(logits: Tensor, places: IntVector | None) -> Tensor:
    """Return each row as often as tokens are sampled from it."""
    if places is None:
        return logits
    (indices,) = on_device([places], logits.device)
    return logits[indices]
