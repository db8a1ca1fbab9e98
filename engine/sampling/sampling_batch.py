"""The requests that sample a token in a step, and how samples are assigned to them."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.compute.batch import InputBatch, RequestState
from engine.compute.inputs import IntVector, PreparedInputs
from engine.outputs import LogprobsLists, ModelRunnerOutput, OtherChoices, SchedulerOutput
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import Samples


@dataclass(frozen=True)
class Drawing:
    """The sampling of a step, prepared before the step is computed; the parameters of each row are derived lazily.

    states: the step's requests. drawers: indices of those that sample; last: the step's token behind which each samples.
    takes_best: each samples one token, that of the highest logit. req_id_to_index: see ModelRunnerOutput.
    """

    states: list[RequestState]
    drawers: list[int]
    last: IntVector
    takes_best: bool
    req_id_to_index: dict[str, int]
    _batch: InputBatch
    _scheduled: SchedulerOutput

    @classmethod
    def of_step(cls, batch: InputBatch, scheduled: SchedulerOutput, inputs: PreparedInputs) -> "Drawing":
        """Prepare the step: a request samples if all its tokens are computed after the step, unless it pools."""
        states = [batch.requests[req_id] for req_id in inputs.req_ids]
        drawers = [
            index
            for index, (state, length) in enumerate(zip(states, inputs.seq_lens.tolist(), strict=True))
            if length >= state.num_tokens and state.pooling is None
        ]
        is_free = not scheduled.structured_output_request_ids
        return cls(
            states=states,
            drawers=drawers,
            last=inputs.query_start_loc[1:][drawers] - 1,
            takes_best=is_free and all(states[index].takes_best for index in drawers),
            req_id_to_index={req_id: index for index, req_id in enumerate(inputs.req_ids)},
            _batch=batch,
            _scheduled=scheduled,
        )

    @cached_property
    def rows(self) -> list[SamplingRow]:
        """The rows to sample: each drawer's own, then those of its further choices."""
        return [row for rows in self._rows_of_drawers for row in rows]

    @cached_property
    def places(self) -> IntVector | None:
        """The index into ``last`` of each of the ``rows``; None if every drawer has one row."""
        counts = [len(rows) for rows in self._rows_of_drawers]
        if max(counts, default=1) == 1:
            return None
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    @property
    def owners(self) -> list[int]:
        """The index of the request of each row."""
        if self.takes_best or self.places is None:
            return self.drawers
        pairs = zip(self.drawers, self._rows_of_drawers, strict=True)
        return [index for index, rows in pairs for _ in rows]

    @cached_property
    def _rows_of_drawers(self) -> list[list[SamplingRow]]:
        names = [self.states[index].req_id for index in self.drawers]
        return [self._batch.sampling_rows(name, self._scheduled.bitmask_of(name)) for name in names]

    def spread(self, samples: Samples) -> ModelRunnerOutput:
        """Assign the samples of rows to their requests."""
        firsts: list[int | None] = [None] * len(self.states)
        output = ModelRunnerOutput(
            list(self.req_id_to_index), self.req_id_to_index, [[] for _ in self.states]
        )
        nans = dict[str, int]()
        others = defaultdict[str, list[int]](list)
        for row, owner in enumerate(self.owners):
            if firsts[owner] is not None:
                others[self.states[owner].req_id].append(row)
                continue
            firsts[owner] = row
            token_id = samples.token_ids[row]
            if token_id is not None:
                output.sampled_token_ids[owner].append(token_id)
            if samples.num_nans[row]:
                nans[self.states[owner].req_id] = samples.num_nans[row]
        output.logprobs = _rows_of(samples.logprobs, firsts)
        output.num_nans_in_logits = nans or None
        output.other_choices = {req_id: _others(rows, samples) for req_id, rows in others.items()}
        return output


def _others(rows: list[int], samples: Samples) -> OtherChoices:
    """Collect the tokens of further choices; their logits are the first row's, so they have a token if it has one."""
    token_ids = [token for row in rows if (token := samples.token_ids[row]) is not None]
    return OtherChoices(token_ids, _rows_of(samples.logprobs, list(rows)))


def _rows_of(logprobs: LogprobsLists | None, rows: list[int] | list[int | None]) -> LogprobsLists | None:
    """Return these rows in this order, an empty one for None."""
    if logprobs is None:
        return None
    return LogprobsLists(
        [[] if row is None else logprobs.logprob_token_ids[row] for row in rows],
        [[] if row is None else logprobs.logprobs[row] for row in rows],
        [0 if row is None else logprobs.sampled_token_ranks[row] for row in rows],
    )
