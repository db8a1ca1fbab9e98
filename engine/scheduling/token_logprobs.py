"""From a step's rectangular log probabilities to those of one token."""

from contract.requests import TokenLogprobs
from engine.outputs import LogprobsLists


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
    ids, values = lists.logprob_token_ids[row], lists.logprobs[row]
    return [
        TokenLogprobs(
            token_id=ids[0],
            logprob=values[0],
            rank=lists.sampled_token_ranks[row],
            top_token_ids=tuple(ids[1 : 1 + num_alternatives]),
            top_logprobs=tuple(values[1 : 1 + num_alternatives]),
        )
    ]
