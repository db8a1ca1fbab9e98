"""The settings file: its values for each command, and its errors."""

from pathlib import Path

import pytest

from contract.errors import SettingError
from serving.settings_file import SettingsFile, is_secret, read_settings_file

COMMANDS = {
    "router": {"max_queue", "log_level", "secret", "secret_file"},
    "decode": {"max_num_seqs", "log_level"},
}


def read(folder: Path, text: str | bytes, mode: int = 0o644) -> SettingsFile:
    path = folder / "kvbaton.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return read_settings_file(path, COMMANDS)


def values(file: SettingsFile, command: str) -> dict[str, object]:
    return {name: given.value for name, given in file.given(command, COMMANDS[command]).items()}


def test_the_top_is_for_all_and_a_table_for_its_command_over_the_top(tmp_path: Path) -> None:
    file = read(
        tmp_path, 'log_level = "info"\nmax_queue = 5\n[decode]\nlog_level = "debug"\nmax_num_seqs = 2\n'
    )
    assert values(file, "router") == {"log_level": "info", "max_queue": 5}
    assert values(file, "decode") == {"log_level": "debug", "max_num_seqs": 2}
    given = file.given("decode", COMMANDS["decode"])
    assert given["log_level"].place == f"{tmp_path}/kvbaton.toml:4 [decode]"
    assert given["log_level"].is_in_table
    assert not file.given("router", COMMANDS["router"])["max_queue"].is_in_table


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_queu = 5\n", ":1: 'max_queu' is not a setting of any command (did you mean max_queue?)"),
        (
            "\n[decode]\nmax-num-seqs = 5\n",
            ":3 [decode]: 'max-num-seqs' is not a setting of decode (did you mean",
        ),
        ("[decode]\nmax_queue = 5\n", "'max_queue' is not a setting of decode (it is one of router)"),
        ("[rooter]\nmax_queue = 5\n", ":1 [rooter]: unknown command 'rooter' (did you mean router?)"),
        ("[zzz]\n", "unknown command 'zzz'; tables are router, decode"),
        ("log_level = \n", "is not valid TOML: Invalid value (at line 1"),
        ("log_level = 'a'\n[log_level]\n", "a name is either a value or a table"),
        (b"log_level = 'a'\n# \xff\n", ":2 is not valid TOML: its bytes are not UTF-8"),
    ],
)
def test_what_is_wrong_is_told_with_file_line_and_the_right_name(
    tmp_path: Path, text: str | bytes, told: str
) -> None:
    with pytest.raises(SettingError) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "kvbaton.toml") in caught.value.message
    assert told in caught.value.message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"none\.toml cannot be read: No such file"):
        read_settings_file(tmp_path / "none.toml", COMMANDS)
    with pytest.raises(SettingError, match="cannot be read: Is a directory"):
        read_settings_file(tmp_path, COMMANDS)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_that_others_can_read_is_refused_without_showing_it(tmp_path: Path, mode: int) -> None:
    with pytest.raises(
        SettingError, match=r"secret is a secret, but the file's mode is 06.*chmod 600"
    ) as caught:
        read(tmp_path, '[router]\nsecret = "hunter2"\n', mode)
    assert "hunter2" not in caught.value.message


def test_a_secret_in_a_private_file_is_taken_and_never_printed(tmp_path: Path) -> None:
    file = read(tmp_path, '[router]\nsecret = "hunter2"\nsecret_file = "f"\n', 0o600)
    assert values(file, "router") == {"secret": "hunter2", "secret_file": "f"}
    assert "hunter2" not in f"{file}{file.given('router', COMMANDS['router'])}"


def test_the_path_of_a_secret_is_no_secret() -> None:
    assert is_secret("secret")
    assert is_secret("api_keys")
    assert not is_secret("secret_file")
    assert not is_secret("max_tokens")
