"""The tokens of one rank's step: the same on every rank."""

import torch
from torch import Tensor

from engine.compute.best_tokens import BestOfRanks, TorchBestTokens
from engine.compute.forward import ForwardPass, best_tokens_on_cuda
from engine.compute.inputs import IntVector
from engine.compute.staging import begin_copy, on_device
from engine.distributed.group import RankGroup
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import Sampling, begin_sampling, samples_of
from engine.sampling.sampling_batch import Drawing


class RankSampler:
    """Turns hidden states into logits, and logits into tokens.

    If all rows of a step take their best tokens, several ranks find them together, without whole logits. Otherwise rank 0
    gathers the logits, samples, and shares the tokens with the others; it alone has log probabilities and counts of NaN.
    """

    def __init__(self, forward: ForwardPass, group: RankGroup, device: torch.device, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._forward = forward
        self._group = group
        self.device = device
        search = best_tokens_on_cuda() if device.type == "cuda" else TorchBestTokens()
        self._find_best = BestOfRanks(group, vocab_size, search) if group.size > 1 else None

    @property
    def is_first(self) -> bool:
        """True on the rank that returns a step's results."""
        return self._group.rank == 0

    def logits(self, hidden: Tensor, rows: IntVector) -> Tensor:
        """Return this rank's logits of these tokens of the step; see LanguageModel."""
        if len(rows) == hidden.shape[0]:  # in order, as they always are
            return self._forward.logits(hidden)
        (indices,) = on_device([rows], self.device)
        return self._forward.logits(hidden[indices])

    def whole_logits(self, hidden: Tensor, rows: IntVector) -> Tensor:
        """Return the logits ``[len(rows), vocab_size]`` of these tokens of the step on rank 0, and its own elsewhere."""
        return self._group.gather_columns(self.logits(hidden, rows), self.vocab_size)

    def begin_step(self, logits: Tensor, drawing: Drawing) -> Sampling:
        """Begin to sample a step's tokens: the best ones if all rows take them, else by row. logits: this rank's."""
        best = self._best_tokens(logits) if drawing.takes_best else None
        if best is not None:
            return best
        whole = self._group.gather_columns(logits, self.vocab_size)
        return self.begin_rows(_repeated(whole, drawing.places), drawing.rows)

    def _best_tokens(self, logits: Tensor) -> Sampling | None:
        """Return the best tokens if they are computed already, or if several ranks find them; None: sample by row."""
        known = self._forward.best_tokens(logits)
        if known is not None or self._find_best is None or not len(logits):
            return known
        best = torch.empty(len(logits), 2, dtype=torch.int64, device=self.device)
        self._find_best(logits, best)
        copied = begin_copy(best)
        return Sampling(lambda: samples_of(copied()), best.T)

    def begin_rows(self, logits: Tensor, rows: list[SamplingRow]) -> Sampling:
        """Begin to sample one token for each row of whole logits; the tokens go from device to device."""
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
