"""Drafts from the request's own tokens, and which of them are kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.ngram import LEAST, MOST, accepted, num_right, propose


def proposed(tokens: list[int], num_drafts: int) -> list[int]:
    return propose(np.array(tokens, dtype=np.int32), num_drafts)


@pytest.mark.parametrize(
    ("tokens", "num_drafts", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], 3, [3, 4, 5]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 2, [4, 9]),  # of two places the newest
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 2, [3, 8]),  # but more equal tokens count first
        ([5, 6, 5, 6], 5, [5, 6, 5, 6, 5]),  # up to the end, and on
        ([3, 3, 3], 4, [3, 3, 3, 3]),
        ([1, 2, 3, 2], 3, []),  # one token alone
        ([1, 2, 3, 4], 3, []),
        ([1, 2, 1, 2], 0, []),
        ([], 3, []),
        ([4, 4], 3, []),
    ],
)
def test_what_followed_the_last_tokens_before(
    tokens: list[int], num_drafts: int, expected: list[int]
) -> None:
    assert proposed(tokens, num_drafts) == expected


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 6))
def test_proposals_continue_a_place_that_is_equal(tokens: list[int], num_drafts: int) -> None:
    drafts = proposed(tokens, num_drafts)
    assert len(drafts) in (0, num_drafts)
    lengths = [
        length
        for length in range(1, MOST + 1)
        if any(tokens[end - length : end] == tokens[-length:] for end in range(length, len(tokens)))
    ]
    assert bool(drafts) == (num_drafts > 0 and len(tokens) > LEAST and max(lengths, default=0) >= LEAST)
    if drafts:
        longest = max(lengths)
        whole = [*tokens, *drafts]
        starts = [
            end for end in range(longest, len(tokens)) if tokens[end - longest : end] == tokens[-longest:]
        ]
        # The newest of these places, read on into the drafts themselves where it reaches the end.
        assert drafts == whole[starts[-1] : starts[-1] + num_drafts]


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 6))
def test_compared_drafts_count_up_to_the_first_wrong_one(tokens: list[int], num_drafts: int) -> None:
    """The number is that of a step which had computed them before the last tokens."""
    drafts = proposed(tokens[:-num_drafts], num_drafts)
    found = num_right(np.array(tokens, dtype=np.int32), num_drafts)
    if drafts:
        assert accepted([*tokens[-num_drafts:], None], drafts)[:found] == drafts[:found]
        assert found == num_drafts or tokens[-num_drafts:][found or 0] != drafts[found or 0]
    else:
        assert found is None


@pytest.mark.parametrize(
    ("tokens", "num_drafts", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3, 4], 2, 2),
        ([1, 2, 3, 4, 1, 2, 3, 9], 2, 1),
        ([1, 2, 3, 4, 1, 2, 9, 4], 2, 0),
        ([1, 2, 3, 4, 5, 6, 3, 4], 2, None),
        ([3, 4], 2, None),
    ],
)
def test_drafts_are_compared_with_the_tokens_behind_them(
    tokens: list[int], num_drafts: int, expected: int | None
) -> None:
    assert num_right(np.array(tokens, dtype=np.int32), num_drafts) == expected


@pytest.mark.parametrize(
    ("sampled", "drafts", "expected"),
    [
        ([1, 2, 3], [1, 2], [1, 2, 3]),
        ([1, 2, 3], [1, 9], [1, 2]),
        ([1, 2, 3], [9, 2], [1]),
        ([1], [], [1]),
        ([None, 2], [1], []),
        ([1, None, 3], [1, 2], [1]),
    ],
)
def test_tokens_count_up_to_the_first_wrong_draft(
    sampled: list[int | None], drafts: list[int], expected: list[int]
) -> None:
    """B8: one token more than right drafts; none behind logits that are not numbers."""
    assert accepted(sampled, drafts) == expected
