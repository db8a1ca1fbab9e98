"""Drafts from the request's own tokens: what followed its last tokens where they occurred before (prompt lookup decoding).

An answer that quotes its prompt, edits a file or fills a form repeats long parts of what is known. The search reads no
weights and takes microseconds, so that it costs nothing where it finds nothing. Method: Saxena, "Prompt Lookup Decoding",
2023; Yang et al., arXiv:2304.04487.
"""

import numpy as np
from numpy.typing import NDArray

LEAST = 2
"""Last tokens that must have occurred before, in a row: one alone is followed by anything."""
MOST = 4
"""Last tokens that are compared. Of the places where most of them occurred, the newest counts."""


def propose(tokens: NDArray[np.int32], num_drafts: int) -> list[int]:
    """Return ``num_drafts`` tokens that may follow ``tokens``, or none."""
    if num_drafts == 0 or len(tokens) <= LEAST:
        return []
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    length = 1
    while length < MOST and len(ends):
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[-1 - length]]
        if not len(longer):
            break
        ends = longer
        length += 1
    if length < LEAST:
        return []
    start = int(ends[-1]) + 1
    drafts: list[int] = tokens[start : start + num_drafts].tolist()
    # The text repeats itself up to its end: then it does so again.
    period = len(tokens) - start
    while len(drafts) < num_drafts:
        drafts.append(drafts[len(drafts) - period])
    return drafts


def num_right(tokens: NDArray[np.int32], num_drafts: int) -> int | None:
    """Return how many drafts before the last ``num_drafts`` tokens would have been right; None if there were none."""
    drafts = propose(tokens[:-num_drafts], num_drafts)
    if not drafts:
        return None
    wrong = np.flatnonzero(tokens[-num_drafts:] != drafts)
    return int(wrong[0]) if len(wrong) else num_drafts


def accepted(sampled: list[int | None], drafts: list[int]) -> list[int]:
    """Return the tokens that were sampled behind right drafts only.

    sampled: the token in the place of each draft, and the one behind the last; None where the logits are not numbers.
    """
    kept: list[int] = []
    for token, draft in zip(sampled, [*drafts, None], strict=True):
        if token is None:
            break
        kept.append(token)
        if token != draft:
            break
    return kept
