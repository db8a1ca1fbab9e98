"""A step of one rank, from its launch to its tokens, which are the same on every rank, and to its embeddings.

An embedding is the final hidden states of a prompt as one vector. ``last`` needs only the state of the prompt's last token,
so the others may come from the prefix cache. ``mean`` and ``max`` need all of them: the scheduler computes every token, and
the sum, or the largest values so far, are carried from chunk to chunk in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.errors import InternalError
from engine.compute.batch import InputBatch, RequestState
from engine.compute.best_tokens import BestOfRanks, TorchBestTokens
from engine.compute.forward import ForwardPass, best_tokens_on_cuda
from engine.compute.inputs import IntVector, Outline, PreparedInputs, outline_next
from engine.compute.staging import begin_copy, on_device, to_device
from engine.connector import LayerWatch
from engine.distributed.group import RankGroup
from engine.kv_cache.state_memory import StateMemory
from engine.models.recurrent_layers import RecurrentLayers
from engine.outputs import LogprobsLists, ModelRunnerOutput, SchedulerOutput
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import Sampling, begin_sampling, samples_of
from engine.sampling.sampling_batch import Drawing, PromptLogprobs

# A vector that is shorter stays shorter than 1.
_LEAST_NORM = 1e-12


class RankSampler:
    """Turns hidden states into logits, and logits into tokens.

    If all rows of a step take their best tokens, several ranks find them together, without whole logits. Otherwise rank 0
    gathers the logits, samples, and shares the tokens with the others; it alone has log probabilities and counts of NaN.
    is_first: True on that rank, which returns a step's results.
    """

    def __init__(self, forward: ForwardPass, group: RankGroup, device: torch.device, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._forward = forward
        self._group = group
        self.device = device
        search = best_tokens_on_cuda() if device.type == "cuda" else TorchBestTokens()
        self._find_best = BestOfRanks(group, vocab_size, search) if group.size > 1 else None
        self.is_first = group.rank == 0

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
        """Start sampling: if every row is greedy, the argmax; otherwise row by row. logits: this rank's."""
        if drawing.is_greedy and (known := self._forward.best_tokens(logits)) is not None:
            return known
        if drawing.is_greedy and self._find_best is not None and len(logits):
            best = torch.empty(len(logits), 2, dtype=torch.int64, device=self.device)
            self._find_best(logits, best)
            copied = begin_copy(best)
            return Sampling(lambda: samples_of(copied()), best.T)
        whole = self._group.gather_columns(logits, self.vocab_size)
        rows, places = drawing.rows_and_places
        if places is not None:  # several tokens are sampled from one row
            (indices,) = on_device([places], whole.device)
            whole = whole[indices]
        return self.begin_rows(whole, rows)

    def begin_rows(self, logits: Tensor, rows: list[SamplingRow]) -> Sampling:
        """Begin to sample one token for each row of whole logits; the tokens go from device to device."""
        if self.is_first:
            sampling = begin_sampling(logits, rows, self._forward.draw)
            assert sampling.drawn is not None, "the tokens are not where the logits are"
            if rows:
                self._group.share(sampling.drawn)
            return sampling
        drawn = torch.empty(2, len(rows), dtype=torch.int64, device=self.device)
        if rows:
            self._group.share(drawn)
        copied = begin_copy(drawn)
        return Sampling(lambda: samples_of(zip(*copied(), strict=True)), drawn)


def pool(
    states: Tensor, inputs: PreparedInputs, requests: list[RequestState], output: ModelRunnerOutput
) -> None:
    """Write the embeddings that a step has finished into ``output``; skip requests that do not pool.

    states: ``[num_tokens, hidden_size]`` of the step, after the final norm. A vector with NaN or infinity is left out and
    counted in ``num_nans_in_logits``. Raises InternalError if a mean or a maximum would miss tokens.
    """
    if all(request.pooling is None for request in requests):
        return
    output.pooler_output = [None] * len(requests)
    for index, request in enumerate(requests):
        if request.pooling is None:
            continue
        start, end = inputs.query_start_loc[index : index + 2]
        is_last_chunk = int(inputs.seq_lens[index]) >= request.num_tokens
        if request.pooling.is_over_all_tokens:
            _add(request, states[start:end], int(inputs.num_computed_tokens[index]))
        if is_last_chunk:
            _note(request, index, states[end - 1], output)


def _add(request: RequestState, states: Tensor, num_computed: int) -> None:
    """Add a chunk to what is pooled; a chunk from the prompt's start, also after a preemption, begins anew."""
    assert request.pooling is not None
    kind = request.pooling.pooling_type
    before = request.pooled_states
    if num_computed and before is None:
        raise InternalError(f"request {request.req_id!r}: the {kind} misses its first {num_computed} tokens")
    is_max = kind == "max"
    chunk = states.amax(dim=0).double() if is_max else states.sum(dim=0, dtype=torch.float64)
    found: NDArray[np.float64] = chunk.cpu().numpy()
    if num_computed and before is not None:
        found = np.maximum(before, found) if is_max else before + found
    request.pooled_states = found


def _note(request: RequestState, index: int, last: Tensor, output: ModelRunnerOutput) -> None:
    """Write the embedding; ``last`` is the state of the last token."""
    assert request.pooling is not None
    vector: NDArray[np.float64]
    if request.pooled_states is None:
        vector = last.to(torch.float64).cpu().numpy()
    else:
        vector = request.pooled_states / (request.num_tokens if request.pooling.pooling_type == "mean" else 1)
    if request.pooling.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), _LEAST_NORM)
    numbers = vector.astype(np.float32)
    if num_bad := int(numbers.size - np.isfinite(numbers).sum()):
        output.num_nans_in_logits = {**(output.num_nans_in_logits or {}), request.req_id: num_bad}
    else:
        output.pooler_output[index] = numbers.tolist()


@dataclass(frozen=True)
class _Sampled:
    """The sampling of a step that has been launched. hidden: the step's final states."""

    drawing: Drawing
    sampling: Sampling
    prompt_logprobs: dict[str, LogprobsLists]
    hidden: Tensor


class BegunStep:
    """A step whose forward pass has begun; ``sample`` launches the rest of it, and ``read`` waits.

    states: waits for the pass; returns None if it was interrupted. next_outline: that of the next step, if all requests
    continue; known when the tokens are sampled.
    """

    def __init__(
        self,
        scheduled: SchedulerOutput,
        batch: InputBatch,
        inputs: PreparedInputs,
        watch: LayerWatch | None,
        states: Callable[[], Tensor | None],
        sampler: RankSampler,
        prompt_logprobs: PromptLogprobs,
    ) -> None:
        self.next_outline: Outline | None = None
        self._scheduled = scheduled
        self._batch = batch
        self._inputs = inputs
        self._watch = watch
        self._states = states
        self._sampler = sampler
        self._prompt_logprobs = prompt_logprobs
        self._sampled: _Sampled | None = None

    def sample(self) -> None:
        """Begin to sample the tokens. The tokens of the step before must have been read."""
        with torch.inference_mode():
            self._sampled = self._sample()

    def tokens_of(self, req_ids: list[str]) -> Tensor:
        """Return the token that each of these requests of the step gets, int64, on the device; ``sample`` comes before.

        Each request of the step samples one token.
        """
        sampled = self._sampled
        assert sampled is not None and sampled.sampling.drawn is not None, "the tokens are not on the device"
        tokens = sampled.sampling.drawn[0].clamp(0, self._sampler.vocab_size - 1)  # a row of NaN may have any
        rows = [sampled.drawing.req_id_to_index[req_id] for req_id in req_ids]
        if rows != list(range(len(rows))):
            return tokens[to_device(np.array(rows), tokens.device)]
        return tokens[: len(rows)]

    def read(self) -> ModelRunnerOutput:
        """Wait for the results, and append the tokens to the batch."""
        with torch.inference_mode():
            sampled = self._sampled or self._sample()
            if sampled is None:
                return ModelRunnerOutput(was_interrupted=True)
            drawing = sampled.drawing
            output = drawing.spread(sampled.sampling.read())
            output.prompt_logprobs_dict = sampled.prompt_logprobs
            may_pool = len(drawing.drawers) < len(drawing.states)
            if may_pool and self._sampler.is_first:  # hidden states are equal on all ranks
                pool(sampled.hidden, self._inputs, drawing.states, output)
        self._batch.append_tokens(drawing.states, output.sampled_token_ids)
        return output

    def roll_back(
        self, output: ModelRunnerOutput, states: StateMemory, recurrent: RecurrentLayers | None
    ) -> None:
        """Remove the wrong drafts of the step from the states of its requests. output: what ``read`` has returned."""
        assert recurrent is not None, "it has states"
        step = self._inputs.state_step
        keys = [self._inputs.req_ids[place] for place in step.drafted]
        # The newest token and each right draft are right: one is sampled behind each of them.
        num_right = [len(output.sampled_token_ids[output.req_id_to_index[key]]) for key in keys]
        with torch.inference_mode():
            states.roll_back(step, num_right, recurrent)

    def _sample(self) -> _Sampled | None:
        batch = self._batch
        # Both while the pass is computed: they need no results.
        drawing = Drawing.of_step(batch, self._scheduled, self._inputs)
        # Behind drafts, how many tokens a request continues by is known only with the results.
        has_drafts = self._scheduled.scheduled_spec_decode_tokens
        next_outline = None if has_drafts else outline_next(batch, self._inputs)
        hidden = self._states()
        if hidden is None:
            return None
        self.next_outline = next_outline
        logits = self._sampler.logits(hidden, drawing.last)
        if self._watch is not None:
            self._watch.on_computed()  # before the sampling, so that published blocks leave as early as they can
        lists = self._prompt_logprobs.of_step(batch, self._inputs, drawing.states, hidden)
        sampling = self._sampler.begin_step(logits, drawing)
        return _Sampled(drawing, sampling, lists, hidden)
