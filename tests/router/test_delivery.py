"""Each token is delivered once and in order, in whichever order the tokens arrive."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.tokens.delivery import Delivery, Token


def piece(first: int, count: int) -> list[Token]:
    return [Token(index, 100 + index) for index in range(first, first + count)]


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[Token]]]]:
    """An answer's length; pieces (attempt, tokens) that cover it in any order, with repeats and tokens of other attempts."""
    total = draw(st.integers(1, 12))
    cover = [(0, piece(index, 1)) for index in range(total)]
    spans = st.tuples(st.integers(0, total - 1), st.integers(1, total))
    repeats = [
        (0, piece(first, min(count, total - first))) for first, count in draw(st.lists(spans, max_size=6))
    ]
    old = [(9, [Token(i, 666)]) for i in draw(st.lists(st.integers(0, total), max_size=4))]
    return total, draw(st.permutations([*cover, *repeats, *old]))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arrivals())
def test_any_interleaving_gives_each_token_once_in_order(
    given_arrivals: tuple[int, list[tuple[int, list[Token]]]],
) -> None:
    total, pieces = given_arrivals
    delivery = Delivery()
    delivery.end = total
    out: list[Token] = []
    seen: set[int] = set()
    for attempt, tokens in pieces:
        out += delivery.accept(attempt, tokens)
        seen |= {token.index for token in tokens if attempt == 0}
        due = next(index for index in range(total + 1) if index not in seen)
        assert len(out) == due, "everything that is due has been released, and nothing else"
        assert delivery.is_complete == (due == total)
    assert out == piece(0, total)


def test_a_later_attempt_continues_at_its_first_index() -> None:
    delivery = Delivery(attempt=2, next_index=3)
    assert delivery.accept(1, piece(3, 1)) == []
    assert delivery.accept(2, piece(0, 5)) == piece(3, 2)
    assert delivery.next_index == 5
    assert not delivery.is_complete


def test_a_token_that_comes_again_is_not_delivered_again() -> None:
    delivery = Delivery()
    assert delivery.accept(0, piece(0, 2)) == piece(0, 2)
    assert delivery.accept(0, piece(1, 2)) == piece(2, 1)
    assert delivery.accept(0, piece(0, 3)) == []


def test_late_tokens_of_an_older_attempt_are_dropped() -> None:
    """Law 5: its worker was given up; tokens that it still sends may differ, and belong to another answer."""
    delivery = Delivery(attempt=1, next_index=2)
    assert delivery.accept(0, piece(2, 2)) == []
    assert delivery.next_index == 2
    assert delivery.accept(1, piece(2, 1)) == piece(2, 1)
