"""Log lines with untrusted text."""

import io
import logging
import unicodedata
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from contract.errors import InvalidRequestError
from serving.logs import MAX_LINE, MAX_RECORDS, WINDOW_SECONDS, RepeatFilter, configure_logs, safe_line


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Collect the output of a configured process, and restore the root logger afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    written = io.StringIO()
    configure_logs("router", "info", written)
    yield written
    root.handlers[:] = handlers
    root.setLevel(level)


@given(st.text(max_size=300))
def test_no_character_of_a_stranger_acts_on_a_terminal(text: str) -> None:
    """L1: control characters, separators and marks of direction come as escapes, others as they are."""
    line = safe_line(text)
    assert len(line.splitlines()) <= 1
    for character in line:
        assert unicodedata.category(character) not in ("Cc", "Zl", "Zp", "Cs")
        assert unicodedata.bidirectional(character) not in (
            "LRE",
            "RLE",
            "LRO",
            "RLO",
            "PDF",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        )


@pytest.mark.parametrize(
    ("forged", "wanted"),
    [
        ("a\n2026-01-01 INFO router: x", r"a\n2026-01-01 INFO router: x"),
        ("\x1b[2J\x00\r\x9b", r"\x1b[2J\x00\r\x9b"),
        ("\u2028\u202e\u2066\ufeff", r"\u2028\u202e\u2066\ufeff"),
        ("back\\n", r"back\\n"),
        ("é 中 😀", "é 中 😀"),
    ],
)
def test_a_forged_line_stays_within_its_own(forged: str, wanted: str, stream: io.StringIO) -> None:
    """L1: in messages, arguments and exceptions."""
    logging.getLogger("router").warning("refused %s", forged)
    try:
        raise InvalidRequestError(forged)
    except InvalidRequestError:
        logging.getLogger("router").exception("failed")
    first, second = stream.getvalue().splitlines()
    assert first.endswith(f"refused {wanted}")
    assert second.endswith(f"InvalidRequestError: {wanted}")


def test_a_line_has_a_length(stream: io.StringIO) -> None:
    """L1: a name of 8 MB is shortened to its beginning, its end, and the number of omitted characters."""
    logging.getLogger("router").warning("model %s is not served", "x" * 8_000_000)
    line = stream.getvalue()
    assert len(line) < MAX_LINE + 200
    assert "model xxx" in line
    assert "characters" in line
    assert line.endswith("is not served\n")
    try:
        raise ValueError("y" * 10**6)
    except ValueError:
        logging.getLogger("router").exception("broken")
    assert len(stream.getvalue()) < 40_000


def test_an_error_has_a_length() -> None:
    """L2: an error quotes a limited part of a request."""
    assert len(InvalidRequestError("x" * 10**7).message) < 3000


def test_a_fault_that_repeats_is_counted() -> None:
    """P3: a loop of faults costs a bounded log, and other records pass."""
    now = [0.0]
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.addFilter(RepeatFilter(lambda: now[0]))
    logger = logging.Logger("asyncio")
    logger.addHandler(handler)

    def fault(number: int) -> None:
        logger.error("accept failed %d", number)

    for number in range(100_000):
        fault(number)
        if number == 50_000:
            logger.error("something else")
    lines = written.getvalue().splitlines()
    assert len(lines) == MAX_RECORDS + 1
    assert "something else" in lines
    now[0] += WINDOW_SECONDS
    fault(7)
    dropped = 100_000 - MAX_RECORDS
    assert written.getvalue().splitlines()[-1] == f"accept failed 7 (and {dropped} more like it before)"


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 3)), max_size=200))
def test_no_place_writes_more_than_its_share(steps: list[tuple[int, float]]) -> None:
    """P3: in every window each place writes at most its limit, and every record is written or counted."""
    now = [0.0]
    repeats = RepeatFilter(lambda: now[0])
    written: dict[int, list[float]] = {}
    for place, pause in steps:
        now[0] += pause / 10
        record = logging.LogRecord("x", logging.WARNING, "file", place, "m", (), None)
        if repeats.filter(record):
            written.setdefault(place, []).append(now[0])
    for times in written.values():
        for begin in range(len(times) - 2 * MAX_RECORDS):
            assert times[begin + 2 * MAX_RECORDS] - times[begin] >= WINDOW_SECONDS
