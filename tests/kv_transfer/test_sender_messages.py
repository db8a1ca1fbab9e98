"""Any messages of a sender, in any order: a fetch goes on or fails, and nothing breaks."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.connector import FirstToken
from kv_transfer.protocol import fetch_side
from kv_transfer.protocol.fetch_side import Fetch, FetchState
from tests.soak_settings import machine_settings

TOKEN_LISTS = st.lists(st.builds(FirstToken, st.integers(-3, 3)), max_size=2).map(tuple)
WORDS: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just(fetch_side.on_announced), st.integers(-2, 4), st.integers(-1, 4), st.just(0.0)),
    st.tuples(st.just(fetch_side.on_started)),
    st.tuples(st.just(fetch_side.on_layers), st.integers(-2, 4), st.integers(-1, 4), st.integers(-1, 9)),
    st.tuples(st.just(fetch_side.on_completed), st.integers(-2, 4), TOKEN_LISTS),
    st.tuples(
        st.just(fetch_side.on_sender_failed), st.sampled_from(["internal", "not_needed"]), st.just("played")
    ),
)
"""A rule, and its arguments after the fetch."""


@machine_settings(300, 1)
@given(words=st.lists(WORDS, max_size=8), reserve_after=st.integers(0, 8), num_cached=st.integers(0, 3))
def test_no_message_of_a_sender_is_impossible(
    words: list[tuple[Any, ...]], reserve_after: int, num_cached: int
) -> None:
    """A sender may send anything in any order: the fetch goes on or fails, and nothing is committed without a read."""
    fetch = Fetch(num_blocks=3)
    num_hints = sum(rule is fetch_side.on_layers for rule, *_ in words)
    for position, (rule, *given_by_sender) in enumerate(words):
        if position == reserve_after and fetch.state is FetchState.WAITING and fetch.is_published:
            fetch, _ = fetch_side.reserve(fetch, (4, 5, 6), num_cached)
        fetch, _ = rule(fetch, *given_by_sender)
        assert fetch.num_posted <= 4 + num_hints
        assert fetch.state not in (FetchState.COMMITTED, FetchState.LANDED)
        if fetch.state is FetchState.VERIFIED:
            assert num_cached == 3, "nothing was missing"
