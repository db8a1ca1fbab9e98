"""The command line: exit code, standard output, standard error."""

import os
import re
import subprocess
import sys

import pytest

from cli.main import COMMANDS
from contract.errors import SettingError
from launch.arguments import is_positional, parse
from launch.command_settings import all_setting_names, settings_class
from serving.settings_file import is_secret


def kvbaton(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command with only these ``KVBATON_*`` variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVBATON_")}  # noqa: TID251
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        env=inherited | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def refusal(*arguments: str, **variables: str) -> str:
    """Return the line, below the log, that rejects a command line."""
    result = kvbaton(*arguments, **variables)
    assert (result.returncode, result.stdout) == (2, "")
    *logged, line = result.stderr.splitlines()
    assert all(" INFO " in record for record in logged)
    return line.removeprefix("kvbaton: ")


def test_help_lists_every_command() -> None:
    text = kvbaton("--help").stdout
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert kvbaton().stdout == text
    assert all(f"\n{command.group}:\n" in text for command in COMMANDS.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_describes_it_and_lists_its_settings(command: str) -> None:
    result = kvbaton(command, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: kvbaton {command} ")
    options = result.stdout.partition("options:")[2]
    flags = re.findall(r"^  --([a-z0-9-]+)", options, re.MULTILINE)
    unwrapped = re.sub(r"\s+", " ", options)
    assert "model" in flags or command in ("serve", "check", "workers", "top", "autoscaler")
    assert all(
        re.search(rf"--{flag}\b[^[]* \((?:default: [^[]*|required)\) \[env", unwrapped) for flag in flags
    )
    assert all(f"[env: KVBATON_{flag.upper().replace('-', '_')}]" in unwrapped for flag in flags)


def test_every_command_has_settings_and_no_settings_are_of_another_command() -> None:
    assert list(all_setting_names()) == list(COMMANDS)


def test_version() -> None:
    assert re.fullmatch(r"kvbaton \d+\.\d+\.\d+\n", kvbaton("--version").stdout)


def test_an_unknown_command_is_answered_with_the_list_of_commands() -> None:
    choice = f"choose one of {', '.join(COMMANDS)}"
    assert refusal("upp") == f"unknown command 'upp' (did you mean up?); {choice}"
    assert refusal("zzzz") == f"unknown command 'zzzz'; {choice}"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("up", "--prefil", "2"), "unrecognized arguments: --prefil *** (see kvbaton up --help)"),
        (("up", "--prefill"), "argument --prefill: expected one argument (see kvbaton up --help)"),
        (("up", "--prefill", "900"), "prefill is '900': .*allowed: at least 0, at most 64 "),
        (("up", "--device", "tpu"), "device is 'tpu': it must be auto, cpu, cuda, or cuda:N"),
        (("up", "--http", "here"), "http is 'here': 'here' is not HOST:PORT"),
        (("up", "--http", "127.0.0.1:70000"), r"http is .* \(port 0..65535; 0 picks a free one\)"),
        (("up", "--prefill", "1"), "prefill is 1 but decode is not given; each needs the other"),
        (("up", "--decode", "2"), "decode is 2 but prefill is not given; each needs the other"),
        (("up", "--max_num_seqs=0"), "max_num_seqs is '0'"),
        (("both", "--model", "/no/such/folder"), "model is '/no/such/folder': neither an existing folder"),
        (("up", "--both", "0"), "prefill, decode and both are all 0; there must be at least one worker"),
        (("up", "--ready-file", "/no/such/folder/f"), "ready_file is '/no/such/folder/f': it must be a file"),
        (("up", "--ready-file", "/"), "ready_file is '/': it must be a file in an existing, writable folder"),
        (("up", "--model", "/no/such/folder"), "model is '/no/such/folder': neither an existing folder"),
        (("prefill", "--max-num-seqs", "0", "--model", "."), "max_num_seqs is '0': .*allowed: at least 1"),
        (("decode", "--model", "."), "model is '.': .* contains no config.json"),
        (("run",), "the following arguments are required: PROMPT (see kvbaton run --help)"),
        (("run", "hi", "--temperature", "3"), "temperature is '3': .*allowed: at least 0, at most 2"),
    ],
)
def test_a_bad_setting_stops_the_process_with_name_value_and_range(
    arguments: tuple[str, ...], told: str
) -> None:
    line = refusal(*arguments)
    assert told in line or re.search(told, line)


def test_a_bad_variable_is_named_like_a_flag() -> None:
    assert "prefill is '-1'" in refusal("up", KVBATON_PREFILL="-1")


def test_an_unknown_variable_is_refused() -> None:
    line = refusal("up", KVBATON_PREFIL="2")
    assert line.startswith(
        "unknown setting KVBATON_PREFIL in the environment (did you mean KVBATON_PREFILL?)"
    )


def test_a_variable_of_another_command_is_accepted() -> None:
    assert kvbaton("--version", KVBATON_LEASE_SECONDS="9").returncode == 0
    assert "model is" in refusal("up", "--model", "/none", KVBATON_LEASE_SECONDS="9", KVBATON_MAX_QUEUE="5")


def test_the_flag_wins_over_the_variable() -> None:
    assert "'/flag'" in refusal("up", "--model", "/flag", KVBATON_MODEL="/variable")
    assert "'/variable'" in refusal("up", KVBATON_MODEL="/variable")


@pytest.mark.parametrize("command", [("run", "hi"), ("chat",), ("batch", "-i", "in", "-o", "out")])
def test_flags_that_start_a_service_contradict_the_url_of_one(command: tuple[str, ...]) -> None:
    line = refusal(*command, "--url", "127.0.0.1:1", "--model", "demo", "--both", "2")
    assert line.startswith(
        "url is http://127.0.0.1:1, a running service, so --both 2, --model demo would have no effect"
    )
    line = refusal(*command, "--http", "127.0.0.1:0", KVBATON_URL="127.0.0.1:1")
    assert "--http 127.0.0.1:0 would have no effect" in line


def test_a_url_of_another_kind_is_refused() -> None:
    assert "url is 'ftp://x': use http://HOST:PORT" in refusal("chat", "--url", "ftp://x")


def test_a_router_without_a_secret_is_refused() -> None:
    assert refusal("router", "--http", "127.0.0.1:0").startswith("secret_file is not set")


def needed_by(command: str) -> list[str]:
    """Return a word for each argument without which the command line is refused before its flags are read."""
    fields = settings_class(command).model_fields.values()
    return ["x" for field in fields if is_positional(field) and field.is_required()]


@pytest.mark.parametrize(
    ("command", "flag", "other"),
    [
        ("router", "--api-keys", "KVBATON_API_KEYS, or give --api-keys-file FILE"),
        ("router", "--admin-keys", "KVBATON_ADMIN_KEYS, or give --admin-keys-file FILE"),
        ("router", "--secret", "KVBATON_SECRET, or give --secret-file FILE"),
        ("decode", "--admin-keys", "--admin-keys-file FILE"),
        ("autoscaler", "--admin-key", "KVBATON_ADMIN_KEY, or give --admin-keys-file FILE"),
        ("workers", "--admin-key", "KVBATON_ADMIN_KEY, or put it into the file of --config"),
        ("run", "--api-key", "KVBATON_API_KEY, or put it into the file of --config"),
    ],
)
def test_a_secret_is_not_accepted_as_a_flag(command: str, flag: str, other: str) -> None:
    """Other users of the machine can see it in the list of processes."""
    for words in ((flag, "sk-not-to-be-told"), (f"{flag}=sk-not-to-be-told",)):
        with pytest.raises(SettingError) as caught:
            parse(settings_class(command), f"kvbaton {command}", [*words, *needed_by(command)])
        assert "is given as a flag, which other users of this machine can see" in caught.value.message
        assert other in caught.value.message
        assert "sk-not-to-be-told" not in caught.value.message


def test_no_command_has_a_secret_that_may_be_a_flag() -> None:
    """A setting that is added later is found by its name."""
    secrets = {
        (command, name) for command, names in all_setting_names().items() for name in names if is_secret(name)
    }
    assert {
        ("router", "api_keys"),
        ("router", "secret"),
        ("top", "admin_key"),
        ("chat", "api_key"),
    } <= secrets
    for command, name in secrets:
        with pytest.raises(SettingError, match=f"{name} is given as a flag"):
            words = [f"--{name.replace('_', '-')}=x", *needed_by(command)]
            parse(settings_class(command), f"kvbaton {command}", words)


@pytest.mark.parametrize(
    "words",
    [
        ("--api-keyz", "sk-not-to-be-told"),
        ("--api-keyz=sk-not-to-be-told",),
        ("-api-keys", "sk-not-to-be-told"),
        ("—api-keys", "sk-not-to-be-told"),
        ("--secrets", "sk-not-to-be-told", "--verbose"),
    ],
)
def test_the_value_of_a_mistyped_flag_is_not_printed(words: tuple[str, ...]) -> None:
    """L10: it may be a key; the flag's name is enough to find the mistake."""
    line = refusal("router", *words)
    assert "sk-not-to-be-told" not in line
    assert words[0].partition("=")[0] in line
