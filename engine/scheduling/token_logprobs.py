"""From what the runner drew in a step to the tokens of one request."""

from contract.outputs import TokenLogprobs
from engine.connector import FirstToken
from engine.outputs import LogprobsLists, ModelRunnerOutput


def first_tokens(
    output: ModelRunnerOutput, key: str, token_id: int, num_alternatives: int | None
) -> list[FirstToken]:
    """Token 0 of every choice of a request whose prompt is computed; ``token_id`` is choice 0's."""
    own = logprobs_in_row(output.logprobs, output.req_id_to_index[key], num_alternatives)
    drawn = [FirstToken(token_id, own[0] if own else None)]
    if others := output.other_choices.get(key):
        for row, other_id in enumerate(others.token_ids):
            logprobs = logprobs_in_row(others.logprobs, row, num_alternatives)
            drawn.append(FirstToken(other_id, logprobs[0] if logprobs else None))
    return drawn


def logprobs_in_row(
    lists: LogprobsLists | None, row: int, num_alternatives: int | None
) -> list[TokenLogprobs] | None:
    """What a request that asked for ``num_alternatives`` gets of its row; None when it did not ask.

    Raises ValueError where it asked and the runner gave none.
    """
    if num_alternatives is None:
        return None
    if lists is None:
        raise ValueError(f"{num_alternatives} log probabilities were asked for, the runner gave none")
    return [_entry(lists, row, num_alternatives)]


def logprobs_in_rows(lists: LogprobsLists, num_alternatives: int) -> list[TokenLogprobs]:
    """All rows."""
    return [_entry(lists, row, num_alternatives) for row in range(len(lists.logprobs))]


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
