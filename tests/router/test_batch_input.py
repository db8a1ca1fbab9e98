"""Random input lines of a batch: each is a request or a problem with its number, and valid ones are read unchanged."""

import io
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.batches.lines import InputLine, Validation, parse_line, valid_lines
from tests.router.batch_cluster import TEXT

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
almost = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.text(max_size=3) | json_values,
        "method": st.sampled_from(["POST", "GET"]) | json_values,
        "url": st.sampled_from([TEXT, "/v1/models"]) | json_values,
        "body": json_values,
        "more": json_values,
    },
)
raw_lines = st.binary(max_size=40).map(lambda raw: raw.replace(b"\n", b" "))


@given(raw_lines | almost.map(lambda line: json.dumps(line).encode()))
def test_a_line_is_a_request_or_a_problem(raw: bytes) -> None:
    found = parse_line(raw, 7, TEXT)
    if isinstance(found, InputLine):
        line = json.loads(raw)
        assert (line["custom_id"], line["method"], line["url"]) == (found.custom_id, "POST", TEXT)
        assert json.loads(found.body) == line["body"]
        assert isinstance(line["body"], dict)
    else:
        assert (found.line, bool(found.code), bool(found.message)) == (7, True, True)


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=4), st.dictionaries(st.text(max_size=3), json_values)))
)
def test_valid_lines_are_read_in_order(requests: list[tuple[str, dict[str, Any]]]) -> None:
    lines = [
        {"custom_id": custom_id, "method": "POST", "url": TEXT, "body": body} for custom_id, body in requests
    ]
    content = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)
    validation = Validation(io.BytesIO(content), TEXT, max_lines=100, max_line_bytes=10_000)
    while not validation.advance(50):
        pass
    is_repeated = len({custom_id for custom_id, _ in requests}) < len(requests)
    codes = {problem.code for problem in validation.problems}
    if not requests:
        assert codes == {"empty_file"}
    elif is_repeated:
        assert codes == {"duplicate_custom_id"}
    else:
        assert not codes
        assert validation.total == len(requests)
        found = valid_lines(io.BytesIO(content), TEXT, 10_000)
        assert [(line.custom_id, json.loads(line.body)) for line in found] == requests
