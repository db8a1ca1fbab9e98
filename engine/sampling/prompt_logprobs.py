"""Log probabilities of a prompt's own tokens, chunk by chunk as it is computed."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from engine.compute.batch import InputBatch, RequestState
from engine.compute.inputs import IntVector, PreparedInputs
from engine.outputs import LogprobsLists
from engine.sampling.sampler import token_logprobs

_MAX_ELEMENTS_AT_ONCE = 2**24


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
