"""Stop strings: exact cuts, independent of the pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text.stop import StopAutomaton, StopStrings, num_held_back


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read character by character: the first stop string that completes wins, of those the longest."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(chunks: list[str], stops: list[str], *, is_kept: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops, is_kept=is_kept)
    out = "".join(matcher.push(chunk) for chunk in chunks)
    return out + matcher.flush(), matcher.matched


@given(
    st.text(alphabet="ab", max_size=20),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 20), max_size=8),
)
def test_the_cut_does_not_depend_on_the_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    marks = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[start:end] for start, end in pairwise(marks)]
    expected, matched = reference(text, stops)
    assert run(chunks, stops) == (expected, matched)
    assert run(chunks, stops, is_kept=True) == (expected + (matched or ""), matched)


@pytest.mark.parametrize("cut", range(len("one STOP two") + 1))
def test_every_cut_of_one_text(cut: int) -> None:
    text = "one STOP two"
    assert run([text[:cut], text[cut:]], ["STOP"]) == ("one ", "STOP")
    assert run([text[:cut], text[cut:]], ["STOP"], is_kept=True) == ("one STOP", "STOP")


def test_only_what_could_still_become_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["STOP", "TOO"])
    assert matcher.push("a S") == "a "
    assert matcher.push("T") == ""
    assert matcher.push("O") == ""
    assert matcher.push("x") == "STOx"
    assert matcher.push("T") == ""
    assert matcher.flush() == "T"


def test_nothing_comes_after_a_match() -> None:
    matcher = StopStrings(["."])
    assert [matcher.push("a.b"), matcher.push("c"), matcher.flush()] == ["a", "", ""]
    assert matcher.matched == "."


@given(
    st.text(alphabet="abé𝄞\n]^-\\", max_size=60),
    st.lists(st.text(alphabet="abé𝄞\n]^-\\", min_size=1, max_size=8), max_size=8),
)
def test_the_automaton_finds_what_reading_finds(text: str, stops: list[str]) -> None:
    """H6: one pass gives the same match, and holds back the same, as looking for each string at each place."""
    matcher = StopStrings(stops)
    sent = ""
    for end in range(1, len(text) + 1):
        sent += matcher.push(text[end - 1])
        expected, matched = reference(text[:end], stops)
        assert matcher.matched == matched
        if matched is not None:
            assert sent == expected
            return
        assert sent == text[: end - num_held_back(text[:end], stops)]


def test_a_token_costs_no_more_with_many_long_stop_strings() -> None:
    """H6: 64 KB of strings that nearly match everywhere do not block the event loop."""
    stops = ["a" * (960 + number) + "b" for number in range(64)]
    matcher = StopStrings(stops)
    sent = "".join(matcher.push("aa") for _ in range(20_000))
    assert sent == "a" * (40_000 - 1023)
    assert matcher.push("b") == ""
    assert matcher.matched == stops[-1]


def test_answers_share_the_automaton() -> None:
    """H6: 128 answers to one prompt build it once."""
    shared = StopAutomaton(["ab", "b"])
    one, other = StopStrings(shared), StopStrings(shared)
    assert (one.push("xa"), other.push("xb"), one.push("c")) == ("x", "x", "ac")
    assert (one.matched, other.matched) == (None, "b")


def test_states_are_made_when_a_string_may_begin() -> None:
    """H2: a thousand prompts with 4,096 characters of stop strings, 10 kB in all, took 700 MB while they waited."""
    automaton = StopAutomaton(["abc" * 100, "bcd"])
    first, second = StopStrings(automaton), StopStrings(automaton)
    assert (first.push("xyz"), automaton.num_states) == ("xyz", 1)
    assert (first.push("xa"), second.push("x")) == ("x", "x")
    num_states = automaton.num_states
    assert num_states == 304
    assert (second.push("xbcd"), second.matched) == ("x", "bcd")
    assert (first.push("b"), first.push("x"), automaton.num_states) == ("", "abx", num_states)
