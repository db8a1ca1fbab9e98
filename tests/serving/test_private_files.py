"""Secrets, API keys and private keys in files: files that other users can read or replace are refused."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.errors import SettingError
from contract.identity import MIN_SECRET_CHARACTERS, new_secret
from router.settings import RouterSettings
from serving.api_keys import ApiKeys
from serving.private_files import read_private_file, who_else_may_replace
from serving.settings import read_secret_file
from serving.tls import read_tls
from tests.private_files import write_private

SECRET = "s3cret" * 8


def read_keys(file: Path) -> None:
    ApiKeys(None, file)


def read_tls_key(file: Path) -> None:
    certificate = file.with_name("certificate")
    certificate.write_text("")
    read_tls(certificate, file)


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("secret_file", read_secret_file),
    ("api_keys_file", read_keys),
    ("tls_key_file", read_tls_key),
]


@pytest.mark.parametrize(("param", "read"), READERS, ids=[name for name, _ in READERS])
@pytest.mark.parametrize("mode", [0o666, 0o644, 0o640, 0o604, 0o660, 0o620, 0o610, 0o601])
def test_a_file_with_secrets_that_others_can_use_is_refused(
    tmp_path: Path, param: str, read: Callable[[Path], object], mode: int
) -> None:
    """M5: a secret file of mode 0666 was accepted."""
    file = write_private(tmp_path / "file", SECRET)
    file.chmod(mode)
    with pytest.raises(SettingError, match=rf"{param} .*/file has mode {mode:04o}.*chmod 600") as caught:
        read(file)
    assert caught.value.param == param
    assert SECRET not in caught.value.message


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mode=st.integers(0, 0o777))
def test_exactly_the_modes_without_bits_for_others_are_private(tmp_path: Path, mode: int) -> None:
    """M5: as a property over every mode."""
    file = write_private(tmp_path / "file", SECRET)
    file.chmod(mode | 0o400)
    if mode & 0o077:
        with pytest.raises(SettingError, match="chmod 600"):
            read_private_file(file, "secret_file")
    else:
        assert read_private_file(file, "secret_file") == SECRET.encode()


@pytest.mark.parametrize("secret", ["4", "4821", "x" * (MIN_SECRET_CHARACTERS - 1), f"  {'x' * 31}  \n\n"])
def test_a_secret_that_can_be_guessed_offline_is_refused(tmp_path: Path, secret: str) -> None:
    """M5: a one-character secret was accepted."""
    with pytest.raises(SettingError, match=r"has \d+ characters.*at least 32.*openssl rand") as caught:
        read_secret_file(write_private(tmp_path / "secret", secret))
    assert "4821" not in caught.value.message.replace(str(tmp_path), "")
    with pytest.raises(SettingError, match="at least 32"):
        RouterSettings(secret=secret.strip()).read_secret()


@pytest.mark.parametrize("text", ["", "\n", " \t\r\n", "\n\n\n"])
def test_a_file_of_white_space_holds_no_secret(tmp_path: Path, text: str) -> None:
    """M5: white space is no secret."""
    with pytest.raises(SettingError, match="is empty"):
        read_secret_file(write_private(tmp_path / "secret", text))


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_ends_of_lines_are_no_part_of_the_secret(tmp_path: Path, end: str) -> None:
    secret = new_secret()
    assert read_secret_file(write_private(tmp_path / "secret", secret + end)) == secret


def test_a_secret_in_a_folder_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    """M5: a user who can write to the folder can replace the file."""
    folder = tmp_path / "open"
    folder.mkdir()
    file = write_private(folder / "secret", SECRET)
    folder.chmod(0o777)
    with pytest.raises(SettingError, match=r"in .*/open of mode 0777.*chmod o-w"):
        read_secret_file(file)
    folder.chmod(0o1777)
    assert read_secret_file(file) == SECRET


def test_both_ends_of_a_link_are_checked(tmp_path: Path) -> None:
    """M5: a link that every user may change makes the file's mode useless."""
    folder = tmp_path / "open"
    folder.mkdir()
    link = folder / "secret"
    link.symlink_to(write_private(tmp_path / "target", SECRET))
    assert read_secret_file(link) == SECRET
    folder.chmod(0o777)
    with pytest.raises(SettingError, match="every user can replace it"):
        read_secret_file(link)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """M5: neither a FIFO, which would block the start, nor a folder."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path in (fifo, tmp_path):
        with pytest.raises(SettingError, match=r"is not a regular file|cannot be read"):
            read_secret_file(path)


def test_a_secret_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = write_private(tmp_path / "secret", "")
    file.write_bytes(b"\xff" * 40)
    with pytest.raises(SettingError, match="not UTF-8"):
        read_secret_file(file)


@pytest.mark.parametrize(
    ("mode", "user", "group", "who"),
    [
        (0o755, 7, 3, None),
        (0o755, 0, 0, None),
        (0o775, 7, 3, None),
        (0o1777, 0, 0, None),
        (0o1775, 0, 99, None),
        (0o755, 8, 3, "its owner, user 8"),
        (0o1777, 8, 3, "its owner, user 8"),
        (0o775, 0, 99, "group 99"),
        (0o770, 7, 99, "group 99"),
    ],
)
def test_who_may_rename_what_lies_in_the_folder(mode: int, user: int, group: int, who: str | None) -> None:
    """M5: only world-writable folders were refused."""
    info = os.stat_result((stat.S_IFDIR | mode, 0, 0, 0, user, group, 0, 0, 0, 0))
    found = who_else_may_replace(info, 7, {3, 4})
    assert found is None if who is None else (found or "").startswith(who)


@pytest.mark.parametrize("secret", [" " * 40, "\n" * 40, "x" * 31 + "\n\n", "\0" * 40, "x" * 31 + "\x07" * 9])
def test_what_is_not_printed_does_not_make_a_secret_longer(tmp_path: Path, secret: str) -> None:
    """M5: 40 spaces in KVBATON_SECRET, and 40 NULs in a file, were accepted."""
    with pytest.raises(SettingError, match=r"has \d+ characters.*at least 32"):
        RouterSettings(secret=secret).read_secret()
    with pytest.raises(SettingError, match=r"at least 32|is empty"):
        read_secret_file(write_private(tmp_path / "secret", secret))


def test_a_secret_is_the_same_in_a_variable_and_in_a_file(tmp_path: Path) -> None:
    """M5: the end of a line counted in the variable and not in the file, so workers were refused."""
    secret = new_secret()
    in_file = read_secret_file(write_private(tmp_path / "secret", f"{secret}\n"))
    assert RouterSettings(secret=f"{secret}\n").read_secret() == in_file == secret


def test_a_variable_that_is_no_text_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match=r"KVBATON_SECRET. is not UTF-8"):
        RouterSettings(secret="\udcff" * 40).read_secret()
