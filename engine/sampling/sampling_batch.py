"""The requests that sample a token in a step, how samples are assigned to them, and log probabilities of prompts' tokens."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from engine.compute.batch import InputBatch, RequestState
from engine.compute.inputs import IntVector, PreparedInputs
from engine.outputs import LogprobsLists, ModelRunnerOutput, OtherChoices, SchedulerOutput
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import Samples, token_logprobs
from engine.speculation.ngram import accepted

_MAX_ELEMENTS_AT_ONCE = 2**24


@dataclass(frozen=True)
class Drawing:
    """The sampling of a step, prepared before the step is computed; the parameters of each row are derived lazily.

    states: the step's requests. drawers: indices of those that sample; last: the step's tokens behind which they sample: one
    each, and its drafts. is_greedy: each token is that of the highest logit. req_id_to_index: see ModelRunnerOutput.
    """

    states: list[RequestState]
    drawers: list[int]
    last: IntVector
    is_greedy: bool
    req_id_to_index: dict[str, int]
    _batch: InputBatch
    _scheduled: SchedulerOutput

    @classmethod
    def of_step(cls, batch: InputBatch, scheduled: SchedulerOutput, inputs: PreparedInputs) -> "Drawing":
        """Prepare the step: a request samples if all its tokens are computed after the step, unless it pools."""
        states: list[RequestState] = []
        drawers: list[int] = []
        is_greedy = not scheduled.structured_output_request_ids
        req_id_to_index: dict[str, int] = {}
        for index, (req_id, length) in enumerate(zip(inputs.req_ids, inputs.seq_lens.tolist(), strict=True)):
            state = batch.requests[req_id]
            states.append(state)
            req_id_to_index[req_id] = index
            if length >= state.num_tokens and state.pooling is None:
                drawers.append(index)
                is_greedy = is_greedy and state.is_greedy
        last = inputs.query_start_loc[1:][drawers] - 1
        if drafts := scheduled.scheduled_spec_decode_tokens:
            counts = [1 + len(drafts.get(states[index].req_id, ())) for index in drawers]
            last = np.concatenate([np.arange(-n, 0) + end + 1 for end, n in zip(last, counts, strict=True)])
        return cls(
            states=states,
            drawers=drawers,
            last=last.astype(np.int32, copy=False),
            is_greedy=is_greedy,
            req_id_to_index=req_id_to_index,
            _batch=batch,
            _scheduled=scheduled,
        )

    @cached_property
    def rows_and_places(self) -> tuple[list[SamplingRow], IntVector | None]:
        """The rows to sample: each drawer's own, then those of its drafts or choices; and the index into ``last`` of each.

        The indices are None if every token of ``last`` has one row.
        """
        rows: list[SamplingRow] = []
        counts: list[int] = []
        scheduled = self._scheduled
        for index in self.drawers:
            req_id = self.states[index].req_id
            if drafts := scheduled.scheduled_spec_decode_tokens.get(req_id):
                places = range(1 + len(drafts))
                rows += self._batch.draft_rows(req_id, [scheduled.bitmask_of(req_id, at) for at in places])
                counts += [1] * len(places)
                continue
            own = self._batch.sampling_rows(req_id, scheduled.bitmask_of(req_id))
            rows += own
            counts.append(len(own))
        if len(rows) == len(counts):
            return rows, None
        return rows, np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    def spread(self, samples: Samples) -> ModelRunnerOutput:
        """Assign the samples of rows to their requests."""
        if self._scheduled.scheduled_spec_decode_tokens:
            return self._verify(samples)
        firsts: list[int | None] = [None] * len(self.states)
        output = ModelRunnerOutput(
            list(self.req_id_to_index), self.req_id_to_index, [[] for _ in self.states]
        )
        nans = dict[str, int]()
        others = defaultdict[str, list[int]](list)
        places = None if self.is_greedy else self.rows_and_places[1]
        owners = self.drawers if places is None else np.take(self.drawers, places).tolist()
        for row, owner in enumerate(owners):
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
        for req_id, further in others.items():
            # Their logits are the first row's, so they have a token if it has one.
            token_ids = [token for row in further if (token := samples.token_ids[row]) is not None]
            output.other_choices[req_id] = OtherChoices(token_ids, _rows_of(samples.logprobs, list(further)))
        return output

    def _verify(self, samples: Samples) -> ModelRunnerOutput:
        """See ``spread``, in a step with drafts; what was sampled behind a wrong draft is dropped."""
        output = ModelRunnerOutput(list(self.req_id_to_index), self.req_id_to_index)
        nans = dict[str, int]()
        kept: list[int] = []
        starts: list[int] = []
        row = 0
        for (
            state
        ) in self.states:  # a step with drafts has one sampled token of each request, and of each draft
            drafts = self._scheduled.scheduled_spec_decode_tokens.get(state.req_id, [])
            tokens = accepted(samples.token_ids[row : row + 1 + len(drafts)], drafts)
            # A later token that is not a number is found again in the next step, as its first one.
            if samples.num_nans[row]:
                nans[state.req_id] = samples.num_nans[row]
            output.sampled_token_ids.append(tokens)
            starts.append(len(kept))
            kept += range(row, row + len(tokens))
            row += 1 + len(drafts)
        logprobs = _rows_of(samples.logprobs, kept)
        output.logprobs = logprobs and logprobs._replace(cu_num_generated_tokens=starts)
        output.num_nans_in_logits = nans or None
        return output


def _rows_of(logprobs: LogprobsLists | None, rows: list[int] | list[int | None]) -> LogprobsLists | None:
    """Return these rows in this order, an empty one for None."""
    if logprobs is None:
        return None
    return LogprobsLists(
        [[] if row is None else logprobs.logprob_token_ids[row] for row in rows],
        [[] if row is None else logprobs.logprobs[row] for row in rows],
        [0 if row is None else logprobs.sampled_token_ranks[row] for row in rows],
    )


class PromptLogprobs:
    """The log probabilities of a step's prompt tokens, for the requests that require them.

    logits: computes the logits of some rows of a step's hidden states; every rank calls it alike. makes_lists: True on
    the rank that returns log probabilities; the others return empty lists.
    """

    def __init__(
        self, logits: Callable[[Tensor, IntVector], Tensor], vocab_size: int, *, makes_lists: bool
    ) -> None:
        self._logits = logits
        self._makes_lists = makes_lists
        self._rows_at_once = max(1, _MAX_ELEMENTS_AT_ONCE // vocab_size)

    def of_step(
        self, batch: InputBatch, inputs: PreparedInputs, states: list[RequestState], hidden: Tensor
    ) -> dict[str, LogprobsLists]:
        """Return by request a row for each prompt token that follows a token of this step.

        states: the step's requests. hidden: the final states ``[num_tokens, hidden_size]`` of the step.
        """
        found = {}
        for index, state in enumerate(states):
            num_alternatives = state.sampling.prompt_logprobs
            if num_alternatives is None:
                continue
            start = int(inputs.num_computed_tokens[index])
            num_rows = min(int(inputs.seq_lens[index]), state.num_prompt_tokens - 1) - start
            if num_rows > 0:
                rows = np.arange(num_rows, dtype=np.int32) + inputs.query_start_loc[index]
                targets = batch.known_tokens(state.req_id)[start + 1 : start + 1 + num_rows]
                found[state.req_id] = self._lists(hidden, rows, targets.tolist(), num_alternatives)
        return found

    def _lists(
        self, hidden: Tensor, rows: IntVector, targets: list[int], num_alternatives: int
    ) -> LogprobsLists:
        lists = LogprobsLists([], [], [])
        for start in range(0, len(rows), self._rows_at_once):
            part = slice(start, start + self._rows_at_once)
            logits = self._logits(hidden, rows[part])
            if self._makes_lists:
                piece = token_logprobs(logits, targets[part], [num_alternatives] * len(logits))
                lists.logprob_token_ids.extend(piece.logprob_token_ids)
                lists.logprobs.extend(piece.logprobs)
                lists.sampled_token_ranks.extend(piece.sampled_token_ranks)
        return lists
