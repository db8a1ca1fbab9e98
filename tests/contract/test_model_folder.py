"""A model folder is input from outside: each fault of a small file is one error that names it, at once and within bounds."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from contract.errors import SettingError
from contract.model_folder import (
    MAX_DEPTH,
    MAX_JSON_BYTES,
    check_entries,
    file_within,
    read_bytes,
    read_json_object,
    read_text,
)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def text(content: str) -> Callable[[Path], None]:
    return raw(content.encode())


def raw(content: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(content)

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (pipe, "is a pipe"),
        (unix_socket, "cannot be opened"),
        (device, "is a device"),
        (folder, "is a folder"),
        (huge, f"the limit is {MAX_JSON_BYTES}"),
        (text("{"), "is not valid JSON"),
        (text("[1]"), "must contain a JSON object, not list"),
        (text("null"), "must contain a JSON object, not null"),
        (text(""), "is not valid JSON"),
        (text('{"a": 1, "b": {"c": 1, "c": 2}}'), "'c' twice"),
        (text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"), "not valid JSON: it is nested too deep"),
        (text('{"a": ' + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1) + "}"), "nested deeper than 64"),
        (text('{"a": ' + "1" * 10_000 + "}"), "is not valid JSON"),
        (raw(b'{"a": "\xff"}'), "is not valid UTF-8"),
        (raw(b"\x00" * 64), "is not valid JSON"),
    ],
)
def test_each_fault_of_a_small_file_is_one_error_that_names_it(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    """L8: a pipe does not hold the reader up, and nothing else than a small regular file is read."""
    path = tmp_path / "config.json"
    make(path)
    with pytest.raises(SettingError, match=words) as caught:
        read_json_object(path)
    assert "config.json" in caught.value.message
    assert caught.value.param == "model"
    assert len(caught.value.message) < 500


def test_a_file_that_is_missing_is_none_and_a_good_one_is_read(tmp_path: Path) -> None:
    assert read_json_object(tmp_path / "none.json") is None
    (tmp_path / "some.json").write_text("\ufeff" + '{"a": [1, {"b": null}]}')
    assert read_json_object(tmp_path / "some.json") == {"a": [1, {"b": None}]}
    (tmp_path / "link.json").symlink_to(tmp_path / "some.json")
    assert read_text(tmp_path / "link.json") == read_text(tmp_path / "some.json")
    with pytest.raises(SettingError, match="cannot be opened"):
        read_bytes(tmp_path / "a\0b")


@pytest.mark.parametrize("make", [pipe, unix_socket, device])
def test_a_folder_with_anything_but_files_and_folders_is_refused(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """L8: whatever the name; a library would open it."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    check_entries(tmp_path)
    make(tmp_path / "adapter_config.json")
    with pytest.raises(SettingError, match=r"adapter_config\.json is a"):
        check_entries(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../other.safetensors",
        "/etc/passwd",
        "a/../../b",
        "",
        "a\0b",
        "..",
        "..\\b",
        None,
        7,
        ["a"],
        "x" * 100_000,
        "link",
        "folder/link",
        "loop",
    ],
)
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: object) -> None:
    """L8: by dots, from the root, by a link, or by no name at all."""
    home, outside = tmp_path / "home", tmp_path / "outside"
    outside.mkdir()
    (outside / "link").write_text("secret")
    home.mkdir()
    (home / "link").symlink_to(outside / "link")
    (home / "folder").symlink_to(outside)
    (home / "loop").symlink_to(home / "loop")
    with pytest.raises(SettingError, match=r"index\.json names") as caught:
        file_within(home, name, "index.json")
    assert len(caught.value.message) < 500


def test_the_links_of_a_cache_of_huggingface_hub_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "revision", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text("weights")
    (snapshot / "model-1.safetensors").symlink_to(Path("../../blobs/abc"))
    assert file_within(snapshot, "model-1.safetensors", "index.json").read_text() == "weights"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=30,
)


@given(content=st.binary(max_size=300) | _VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_object_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    """L8: nothing else is ever raised."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_bytes(content)
    found: Any = None
    try:
        found = read_json_object(path)
    except SettingError as error:
        assert "config.json" in error.message
    else:
        assert isinstance(found, dict)


@given(
    name=st.text(max_size=30)
    | st.lists(st.sampled_from(["..", ".", "a", "/", "~"]), max_size=5).map("/".join)
)
def test_any_name_is_within_the_folder_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """L8: a name never leads out."""
    home = tmp_path_factory.mktemp("home")
    try:
        found = file_within(home, name, "index.json")
    except SettingError:
        return
    assert found.resolve().is_relative_to(home.resolve())
