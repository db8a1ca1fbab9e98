"""The tokens and log probabilities of one request, taken from the results of a step."""

from contract.outputs import TokenLogprobs
from contract.requests import EngineRequest, ReceiveTransfer
from engine.connector import FirstToken
from engine.outputs import LogprobsLists, ModelRunnerOutput


class PromptLogprobEntries:
    """The log probabilities of a prompt's tokens, as far as steps have computed them.

    num_alternatives: alternatives of each token; None for a request that needs no log probabilities of its prompt.
    num_entries: one for each token of the prompt but the first.
    """

    def __init__(self, num_alternatives: int | None, num_entries: int) -> None:
        self.entries: list[TokenLogprobs] = []
        self._num_alternatives = num_alternatives
        self._num_entries = num_entries

    @classmethod
    def of(cls, engine_request: EngineRequest) -> "PromptLogprobEntries":
        """Return an empty list for this request. The prefill leg reports them, a decode leg does not."""
        is_receiving = isinstance(engine_request.transfer, ReceiveTransfer)
        num_alternatives = None if is_receiving else engine_request.sampling.prompt_logprobs
        return cls(num_alternatives, len(engine_request.prompt_token_ids) - 1)

    @property
    def are_missing(self) -> bool:
        """True while some are needed and not computed, so that no token of the prompt may be skipped."""
        return self._num_alternatives is not None and len(self.entries) < self._num_entries

    def extend(self, lists: LogprobsLists | None) -> None:
        """Append those that a step has computed."""
        if lists is not None and self._num_alternatives is not None and self.are_missing:
            num_rows = len(lists.logprobs)
            self.entries += [_entry(lists, row, self._num_alternatives) for row in range(num_rows)]

    def restart(self) -> None:
        """Drop an incomplete list: the prompt is computed again from its start."""
        if self.are_missing:  # a list that is complete is the same when the prompt is computed again
            self.entries = []


def first_tokens(
    output: ModelRunnerOutput, key: str, token_id: int, num_alternatives: int | None
) -> list[FirstToken]:
    """Return the first token of every choice of a request whose prompt is computed; ``token_id`` is choice 0's."""
    own = sampled_logprobs(output.logprobs, output.req_id_to_index[key], 1, num_alternatives)
    tokens = [FirstToken(token_id, own[0] if own else None)]
    if others := output.other_choices.get(key):
        for row, other_id in enumerate(others.token_ids):
            logprobs = sampled_logprobs(others.logprobs, row, 1, num_alternatives)
            tokens.append(FirstToken(other_id, logprobs[0] if logprobs else None))
    return tokens


def sampled_logprobs(
    lists: LogprobsLists | None, index: int, num_tokens: int, num_alternatives: int | None
) -> list[TokenLogprobs] | None:
    """Return the log probabilities of the first tokens that request ``index`` has sampled; None if it asked for none.

    Raises ValueError if it asked and the runner returned none.
    """
    if num_alternatives is None:
        return None
    if lists is None:
        raise ValueError(f"{num_alternatives} log probabilities were asked for, the runner gave none")
    rows = lists.cu_num_generated_tokens
    first = index if rows is None else rows[index]
    return [_entry(lists, row, num_alternatives) for row in range(first, first + num_tokens)]


def _entry(lists: LogprobsLists, row: int, num_alternatives: int) -> TokenLogprobs:
    ids = lists.logprob_token_ids[row]
    values = lists.logprobs[row]
    return TokenLogprobs(
        token_id=ids[0],
        logprob=values[0],
        rank=lists.sampled_token_ranks[row],
        top_token_ids=tuple(ids[1 : 1 + num_alternatives]),
        top_logprobs=tuple(values[1 : 1 + num_alternatives]),
    )
