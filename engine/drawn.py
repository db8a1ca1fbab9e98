"""From the rows of what was drawn in a step to the requests that they belong to."""

from engine.outputs import LogprobsLists, ModelRunnerOutput, OtherChoices
from engine.sampling import Samples


def spread(req_ids: list[str], owners: list[int], samples: Samples) -> ModelRunnerOutput:
    """Row i was drawn for request ``owners[i]``; a request's first row is its own, others are its further choices'."""
    rows: list[list[int]] = [[] for _ in req_ids]
    for row, owner in enumerate(owners):
        rows[owner].append(row)
    firsts = [own[0] if own else None for own in rows]
    token_ids = [None if first is None else samples.token_ids[first] for first in firsts]
    nans = {
        req_id: samples.num_nans[first]
        for req_id, first in zip(req_ids, firsts, strict=True)
        if first is not None and samples.num_nans[first]
    }
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
        sampled_token_ids=[[] if token_id is None else [token_id] for token_id in token_ids],
        logprobs=_rows_of(samples.logprobs, firsts),
        other_choices={
            req_id: _others(own[1:], samples)
            for req_id, own in zip(req_ids, rows, strict=True)
            if len(own) > 1
        },
        num_nans_in_logits=nans or None,
    )


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
