"""A step of one rank, from its launch to its tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.compute.batch import InputBatch
from engine.compute.inputs import Outline, PreparedInputs, outline_next
from engine.compute.pooling import pool
from engine.compute.rank_sampler import RankSampler
from engine.compute.staging import to_device
from engine.connector import LayerWatch
from engine.outputs import LogprobsLists, ModelRunnerOutput, SchedulerOutput
from engine.sampling.prompt_logprobs import PromptLogprobs
from engine.sampling.sampler import Sampling
from engine.sampling.sampling_batch import Drawing


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

    def _sample(self) -> _Sampled | None:
        batch = self._batch
        drawing = Drawing.of_step(batch, self._scheduled, self._inputs)  # while the pass is computed
        next_outline = outline_next(batch, self._inputs)
        hidden = self._states()
        if hidden is None:
            return None
        self.next_outline = next_outline
        logits = self._sampler.logits(hidden, drawing.last)
        if self._watch is not None:
            self._watch.computed()
        lists = self._prompt_logprobs.of_step(batch, self._inputs, drawing.states, hidden)
        sampling = self._sampler.begin_step(logits, drawing)
        return _Sampled(drawing, sampling, lists, hidden)
