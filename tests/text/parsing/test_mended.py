"""Repair of arguments to a JSON object, whole and in pieces."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from text.parsing.mended import ArgumentsWriter, arguments_object

BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("", {}),
    "null": (" null ", {}),
    "cut in a string": ('{"city": "Par', {"city": "Par"}),
    "cut in a key": ('{"city": "Paris", "da', {"city": "Paris"}),
    "cut behind a key": ('{"city": "Paris", "days"', {"city": "Paris"}),
    "cut before a value": ('{"city": ', {}),
    "cut in a number": ('{"days": 12', {"days": 12}),
    "cut in an escape": ('{"a": "b\\', {"a": "b"}),
    "cut in a unicode escape": ('{"a": "b\\u00', {"a": "b"}),
    "cut deep": ('{"a": [{"b": [1, 2', {"a": [{"b": [1, 2]}]}),
    "a raw newline": ('{"code": "a\nb\tc"}', {"code": "a\nb\tc"}),
    "NaN": ('{"x": NaN, "y": -Infinity}', {"x": "NaN", "y": "-Infinity"}),
    "Python's words": ('{"x": True, "y": None}', {"x": True, "y": None}),
    "a trailing comma": ('{"a": [1, 2,],}', {"a": [1, 2]}),
    "a missing comma": ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
    "a missing value": ('{"a": , "b": }', {"a": None, "b": None}),
    "keys without quotes": ("{a: 1}", {"a": 1}),
    "a wrong escape": ('{"a": "\\d+ \\u12g"}', {"a": "\\d+ \\u12g"}),
    "half a pair": ('{"a": "\\ud83d!"}', {"a": "\ufffd!"}),
    "two halves": ('{"a": "\\ud83d\\ud83d\\ude00"}', {"a": "\ufffd😀"}),
    "a list": ('["A"]', {"arguments": ["A"]}),
    "a string": ('"A', {"arguments": "A"}),
    "a number": ("7", {"arguments": 7}),
    "words": ("the city of Paris", {"arguments": "the city of Paris"}),
    "wrong brackets": ('{"a": ]}', {"a": "]"}),
    "leading zeros": ('{"a": 007}', {"a": "007"}),
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)
NOISE = st.text(alphabet='{}[]",:\\ \nuN0-1aé\ud83d', max_size=30)


def written(*texts: str) -> str:
    writer = ArgumentsWriter()
    return "".join([*map(writer.push, texts), writer.flush()])


@pytest.mark.parametrize("name", BROKEN)
def test_broken_arguments_are_kept_as_far_as_they_can_be(name: str) -> None:
    """F10: cut arguments, raw newlines, NaN, trailing commas and lists."""
    text, value = BROKEN[name]
    assert arguments_object(text) == value
    assert json.loads(written(*text)) == value


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4), st.booleans(), st.sampled_from([None, 2]))
def test_valid_arguments_keep_their_value(value: dict[str, Any], is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert json.loads(written(text)) == arguments_object(text) == json.loads(text)


@given(NOISE, st.data())
@example("[" * 5000, None)
@example('{"a":' * 5000, None)
def test_any_text_becomes_one_object_however_it_is_cut(text: str, data: st.DataObject | None) -> None:
    """F10: no text of a model is rejected, and the pieces make no difference."""
    whole = written(text)
    assert isinstance(json.loads(whole), dict)
    assert isinstance(msgspec.json.decode(whole.encode()), dict)
    assert isinstance(arguments_object(text), dict)
    if data:
        cut = data.draw(st.integers(0, len(text)))
        assert written(text[:cut], text[cut:]) == whole
        assert written(*text) == whole


def test_deep_arguments_become_an_object_that_can_be_written_out() -> None:
    """F10: a chat template cannot write values nested deeper than Python's recursion limit."""
    text = '{"a": ' * 400 + "1" + "}" * 400
    assert len(json.dumps(arguments_object(text))) < len(text)
    assert arguments_object('{"a": ' * 60 + "1" + "}" * 60)["a"]["a"]


def test_what_is_certain_is_written_at_once() -> None:
    writer = ArgumentsWriter()
    assert writer.push('{"code": "abc') == '{"code": "abc'
    assert writer.push("\ndef") == "\\ndef"
    assert writer.flush() == '"}'
