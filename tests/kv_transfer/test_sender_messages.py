"""Any messages of a sender, in any order: a fetch goes on or fails, and nothing breaks."""

from hypothesis import given
from hypothesis import strategies as st

from engine.connector import FirstToken
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import fetch_side
from kv_transfer.protocol.fetch_side import Fetch, FetchState, advance_fetch
from tests.soak_settings import machine_settings

TOKEN_LISTS = st.lists(st.builds(FirstToken, st.integers(-3, 3)), max_size=2).map(tuple)
RANGES = st.builds(ev.BlockRange, st.integers(-2, 4), st.lists(st.integers(), max_size=4).map(tuple))
WORDS = st.one_of(
    st.builds(ev.Announced, RANGES, st.just(0.0)),
    st.builds(ev.Started),
    st.builds(ev.LayerRange, st.integers(-2, 4), st.integers(-1, 4), st.integers(-1, 9)),
    st.builds(ev.Completed, st.integers(-2, 4), TOKEN_LISTS),
    st.builds(ev.SenderFailed, st.sampled_from(["internal", "not_needed"]), st.just("played")),
)


@machine_settings(300, 1)
@given(words=st.lists(WORDS, max_size=8), reserve_after=st.integers(0, 8), num_cached=st.integers(0, 3))
def test_no_message_of_a_sender_is_impossible(
    words: list[ev.FetchEvent], reserve_after: int, num_cached: int
) -> None:
    """A sender may send anything in any order: the fetch goes on or fails, and nothing is committed without a read."""
    fetch = Fetch(num_blocks=3)
    for position, word in enumerate(words):
        if position == reserve_after and fetch.state is FetchState.WAITING and fetch.is_published:
            fetch, _ = fetch_side.reserved(fetch, (4, 5, 6), num_cached)
        fetch, _ = advance_fetch(fetch, word)
        assert fetch.num_posted <= 4 + sum(isinstance(each, ev.LayerRange) for each in words)
        assert fetch.state not in (FetchState.COMMITTED, FetchState.LANDED)
        if fetch.state is FetchState.VERIFIED:
            assert num_cached == 3, "nothing was missing"
