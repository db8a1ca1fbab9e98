"""Who draws tokens in a step, and what each request gets of them."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from engine.batch import InputBatch, RequestState
from engine.inputs import IntVector, PreparedInputs
from engine.outputs import LogprobsLists, ModelRunnerOutput, OtherChoices, SchedulerOutput
from engine.sampling import Samples
from engine.scores import SamplingRow


@dataclass(frozen=True)
class Drawing:
    """All that is known of it before the step is computed.

    states: of the step's requests. rows: how each token is drawn, and owners: for which of the requests; one's first row is
    its own, others are its further choices'. last ``[num_drawers]``: behind which of the step's tokens; places: of each row
    in ``last``, None where every drawer has one row; takes_best: so it is, and every row does. req_id_to_index: see
    ModelRunnerOutput.
    """

    states: list[RequestState]
    rows: list[SamplingRow]
    owners: list[int]
    last: IntVector
    places: IntVector | None
    takes_best: bool
    req_id_to_index: dict[str, int]

    @classmethod
    def of_step(cls, batch: InputBatch, scheduled: SchedulerOutput, inputs: PreparedInputs) -> "Drawing":
        """A request draws when all its known tokens are computed after the step, unless it pools."""
        states = [batch.requests[req_id] for req_id in inputs.req_ids]
        rows: list[SamplingRow] = []
        owners: list[int] = []
        drawers: list[int] = []
        for index, (state, length) in enumerate(zip(states, inputs.seq_lens.tolist(), strict=True)):
            if length >= state.num_tokens and state.pooling is None:
                own = batch.sampling_rows(state.req_id, scheduled.bitmask_of(state.req_id))
                rows += own
                owners += [index] * len(own)
                drawers.append(index)
        has_more = len(rows) > len(drawers)
        return cls(
            states=states,
            rows=rows,
            owners=owners,
            last=inputs.query_start_loc[1:][drawers] - 1,
            places=np.searchsorted(drawers, owners).astype(np.int32) if has_more else None,
            takes_best=not has_more and all(row.takes_best for row in rows),
            req_id_to_index={req_id: index for index, req_id in enumerate(inputs.req_ids)},
        )

    def spread(self, samples: Samples) -> ModelRunnerOutput:
        """What was drawn row by row, request by request."""
        firsts: list[int | None] = [None] * len(self.states)
        output = ModelRunnerOutput(
            list(self.req_id_to_index), self.req_id_to_index, [[] for _ in self.states]
        )
        nans, others = dict[str, int](), defaultdict[str, list[int]](list)
        for row, owner in enumerate(self.owners):
            if firsts[owner] is not None:
                others[self.states[owner].req_id].append(row)
                continue
            firsts[owner], token_id = row, samples.token_ids[row]
            if token_id is not None:
                output.sampled_token_ids[owner].append(token_id)
            if samples.num_nans[row]:
                nans[self.states[owner].req_id] = samples.num_nans[row]
        output.logprobs, output.num_nans_in_logits = _rows_of(samples.logprobs, firsts), nans or None
        output.other_choices = {req_id: _others(rows, samples) for req_id, rows in others.items()}
        return output


def _others(rows: list[int], samples: Samples) -> OtherChoices:
    """Their logits are those of the first row: where that one has a token they have one as well."""
    token_ids = [token for row in rows if (token := samples.token_ids[row]) is not None]
    return OtherChoices(token_ids, _rows_of(samples.logprobs, list(rows)))


def _rows_of(logprobs: LogprobsLists | None, rows: list[int] | list[int | None]) -> LogprobsLists | None:
    """These rows in this order, an empty one for None."""
    if logprobs is None:
        return None
    return LogprobsLists(
        [[] if row is None else logprobs.logprob_token_ids[row] for row in rows],
        [[] if row is None else logprobs.logprobs[row] for row in rows],
        [0 if row is None else logprobs.sampled_token_ranks[row] for row in rows],
    )
