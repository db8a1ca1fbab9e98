"""API keys from a setting and from a file that changes while it is used."""

import logging
from pathlib import Path

import pytest

from contract.errors import SettingError, UnauthenticatedError
from serving.api_keys import ApiKeys, first_key
from tests.private_files import write_private


def lets_in(keys: ApiKeys, key: str) -> bool:
    try:
        keys.check(f"Bearer {key}")
    except UnauthenticatedError as error:
        assert error.code == "invalid_api_key"
        assert key not in error.message
        return False
    return True


def test_without_keys_everybody_is_let_in() -> None:
    keys = ApiKeys()
    assert not keys.are_required
    keys.check(None)
    keys.check("Bearer dummy")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic abc", "abc", "Bearer  ", "bearer ab", "Bearer abc abc"]
)
def test_what_is_no_valid_key_is_refused(header: str | None) -> None:
    with pytest.raises(UnauthenticatedError):
        ApiKeys("abc").check(header)


def test_every_key_of_setting_and_file_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write_private(file, "# those of team A\n\nfirst  # alice\n  sec#ond\n")
    keys = ApiKeys("third, fourth,", file)
    assert [lets_in(keys, key) for key in ("first", "sec#ond", "third", "fourth")] == [True] * 4
    assert [lets_in(keys, key) for key in ("alice", "# those", "sec", "firs", "firstx", "\udcff")] == [
        False
    ] * 6
    keys.check("bearer  first ")


def test_the_first_key_is_one_that_is_let_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write_private(file, "# team A\nin-file # alice\nsecond\n")
    assert first_key(None, None) is None
    assert first_key(" , given, other", file) == "given"
    assert first_key(None, file) == first_key("", file) == "in-file"
    assert lets_in(ApiKeys(None, file), "in-file")
    with pytest.raises(SettingError, match="api_keys_file"):
        first_key(None, tmp_path / "none")


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write_private(file, "old-key\n")
    keys = ApiKeys(None, file)
    assert lets_in(keys, "old-key")
    write_private(file, "new-key-1\n")
    assert (lets_in(keys, "old-key"), lets_in(keys, "new-key-1")) == (False, True)
    write_private(tmp_path / "next", "new-key-2\n")
    (tmp_path / "next").replace(file)
    assert (lets_in(keys, "new-key-1"), lets_in(keys, "new-key-2")) == (False, True)


def test_a_file_that_goes_bad_lets_nobody_in_until_it_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    write_private(file, "good-key\n")
    keys = ApiKeys("given", file)
    for content in (b"", b"# none\n", b"good-key\nnot a key\n", b"\xff\xfe\n"):
        file.write_bytes(content)
        assert (lets_in(keys, "good-key"), lets_in(keys, "given")) == (False, True)
    file.unlink()
    assert not lets_in(keys, "good-key")
    write_private(file, "good-key\n")
    assert lets_in(keys, "good-key")
    logged = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(logged) == 5
    assert "good-key" not in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("# only this\n", "contains no key"),
        ("ok\nsecret one\n", "entry 2 is not a valid key"),
    ],
)
def test_a_bad_file_stops_the_start(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        write_private(file, content)
    with pytest.raises(SettingError, match=words) as caught:
        ApiKeys(None, file)
    assert caught.value.param == "api_keys_file"
    assert "secret" not in caught.value.message


def test_a_bad_setting_stops_the_start() -> None:
    with pytest.raises(SettingError, match="api_keys: entry 2 is not a valid key") as caught:
        ApiKeys("a,b c")
    assert caught.value.param == "api_keys"


def test_a_tenant_is_a_digest_of_its_key_and_nobody_is_one_without_keys() -> None:
    keys = ApiKeys("alice-key, bob-key")
    alice, bob = keys.tenant("Bearer alice-key"), keys.tenant("Bearer bob-key")
    assert alice == keys.tenant("bearer  alice-key ") != bob
    assert len(alice) == 32
    assert "alice" not in alice
    assert ApiKeys().tenant("Bearer dummy") == ""


def test_short_keys_are_logged_by_their_number(caplog: pytest.LogCaptureFixture) -> None:
    """M5: they are accepted, since clients use them, with a warning."""
    ApiKeys("a" * 31 + "," + "b" * 32 + ",c")
    (record,) = caplog.records
    assert record.getMessage().startswith("2 of 3 API keys have fewer than 32 characters")
    assert "aaa" not in record.getMessage()
    caplog.clear()
    ApiKeys("b" * 32)
    assert not caplog.records


@pytest.mark.parametrize("keys", ["", " ", ",", " , \t,"])
def test_a_setting_without_a_key_lets_nobody_in_by_accident(keys: str) -> None:
    """M5: an empty variable opened the service to every client."""
    with pytest.raises(SettingError, match="api_keys is set but contains no key"):
        ApiKeys(keys)
