"""Every flag of every command: a value that cannot be one is refused with the flag that the user wrote."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from pydantic.fields import FieldInfo

from cli.main import COMMANDS, run_command
from cli.operate import workers
from contract.errors import SettingError
from launch import client_settings
from launch.arguments import is_positional, parse
from launch.command_settings import settings_class
from serving.settings import Settings
from serving.settings_file import is_secret

NONSENSE = "no nsense"
NEEDED = {"batch": ("-i", "in", "-o", "out"), "bench": ("--profile",), "run": ("prompt",)}
"""The words without which a command line is refused before its flags are read."""
ACTIONS = ("list", "drain", "undrain", "flip", "reset-prefix-cache", "reload-weights")
FORMS = {"--deadline-seconds": "--deadline", "--as-json": "--json"}
PAIRED = {"prefill": "decode", "decode": "prefill"}


def flags() -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield each command with the name and the declaration of each of its settings that is a flag."""
    for command in COMMANDS:
        for name, field in settings_class(command).model_fields.items():
            if not is_positional(field):
                yield command, name, field


def takes_any_text(field: FieldInfo) -> bool:
    """Return True for names and paths, which the command itself judges later."""
    found = {field.annotation, *get_args(field.annotation)}
    texts = {str, Path} | {each for each in found if {str, Path} & set(get_args(each))}
    return bool(found & texts)


def refusal(command: str, *words: str) -> str | None:
    try:
        parse(settings_class(command), f"kvbaton {command}", [*words, *NEEDED.get(command, ())])
    except SettingError as error:
        return error.message
    return None


@pytest.mark.parametrize("command", COMMANDS)
def test_a_value_that_cannot_be_one_is_refused_with_the_flag_as_written(command: str) -> None:
    num_refused = 0
    for one, name, field in flags():
        if one != command:
            continue
        usual = f"--{name.replace('_', '-')}"
        for flag in {usual, f"--{name}", FORMS.get(usual, usual)}:
            message = refusal(command, f"{flag}={NONSENSE}")
            assert message is not None or takes_any_text(field), (command, flag)
            assert message is None or re.search(rf"{flag}\b(?![-_])", message), (command, flag, message)
            num_refused += message is not None
    assert num_refused >= 5


@pytest.mark.parametrize("command", ["up", "compose", "autoscaler"])
@pytest.mark.parametrize("name", ["prefill", "decode"])
@pytest.mark.parametrize(
    "text", ["1:x", "x:1", "1:", ":3", ":", "1:2:3", "4:2", "0:0", "1:65", "-1:2", "1:900", "1.5:2", "²:3"]
)
def test_a_range_that_is_none_is_shown_as_it_was_written(command: str, name: str, text: str) -> None:
    """B15: ``--prefill 1:x`` must not blame ``max_prefill``, which was not given."""
    for switch in ((), ("--autoscale",)) if command != "autoscaler" else ((),):
        message = refusal(command, f"--{name}={text}", f"--{PAIRED[name]}=1", *switch)
        assert message is not None and message.startswith(f"{name} is {text!r}: a range is LEAST:MOST")
        assert f"--{name} or KVBATON_{name.upper()}" in message
        assert "max_" not in message


@pytest.mark.parametrize(("command", "name"), [("up", "prefill"), ("up", "decode"), ("compose", "prefill")])
def test_a_range_without_autoscale_blames_the_range(command: str, name: str) -> None:
    message = refusal(command, f"--{name}=1:4", f"--{PAIRED[name]}=1")
    assert message == f"{name} is 1:4, and a range has no effect without autoscale (--{name})"


def test_a_range_that_the_listed_gpus_contradict_is_shown_as_it_was_written() -> None:
    words = ("--autoscale", "--prefill", "1:4", "--decode", "1", "--prefill-devices", "0,1")
    settings: Any = parse(settings_class("compose"), "kvbaton compose", [*words, "--decode-devices", "2"])
    with pytest.raises(SettingError, match=r"^prefill is 1:4, and prefill_devices has GPUs for 2 workers"):
        settings.places()


def test_a_switch_with_a_value_is_named_and_the_value_is_not_shown() -> None:
    assert (
        refusal("up", "--dry-run", "sk-none")
        == refusal("up", "--dry-run=sk-none")
        == "dry_run is a switch: --dry-run takes no value"
    )
    assert (
        refusal("router", "--no-strict-api", "x") == "strict_api is a switch: --no-strict-api takes no value"
    )
    assert refusal("check", "--as-json", "demo") is None  # the word is the model


def reading(command: str) -> tuple[type[Settings], str, tuple[str, ...]]:
    """Return the settings of a command or of an action of ``workers``, its name, and the words that it needs."""
    if command in ACTIONS:
        of_all: dict[str, tuple[str, ...]] = dict.fromkeys(
            ("list", "reset-prefix-cache", "reload-weights"), ()
        )
        words = {**of_all, "flip": ("decode-0", "decode")}.get(command, ("decode-0",))
        return client_settings.ACTIONS[command], f"kvbaton workers {command}", words
    return settings_class(command), f"kvbaton {command}", NEEDED.get(command, ())


def spelled(command: str, has_underscore: Callable[[], bool]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield lines with all flags of a command, and their usual forms. Some of the dashes in a flag are underscores.

    There is a wrong value in each line, and an error about all flags of a line is not shortened.
    """
    names = [
        (name, field)
        for name, field in reading(command)[0].model_fields.items()
        if not is_positional(field) and not is_secret(name) and name not in ("config", "log_level")
    ]
    for some in (names[start : start + 6] for start in range(0, len(names), 6)):
        words, usual = [], {}
        for name, field in (*some, ("log_level", None)):
            is_switch = field is not None and field.annotation is bool
            for bare in (name, f"no_{name}") if is_switch else (name,):
                flag = "--" + "".join("-" if each == "_" and not has_underscore() else each for each in bare)
                usual[flag] = f"--{bare.replace('_', '-')}"
                value = f"no_va-lue of_{name}"
                words += [flag] if is_switch else [f"{flag}={value}"] if len(name) % 2 else [flag, value]
        yield words, usual


def outcome(command: str, words: Sequence[str], usual: dict[str, str]) -> str:
    """Return the error of a command line, with the usual form of each flag."""
    known, name, needed = reading(command)
    with pytest.raises(SettingError) as caught:
        parse(known, name, [*words, *needed])
    return re.sub(r"(?<![-\w])--[-\w]+", lambda flag: usual.get(flag[0], flag[0]), caught.value.message)


@pytest.mark.parametrize("command", [*COMMANDS, *ACTIONS])
def test_each_flag_may_have_underscores(command: str) -> None:
    """A42: for any of its dashes; a value keeps its own, and an error repeats the flag as it was written."""
    draw = Random(command)
    mixed = list(spelled(command, lambda: draw.random() < 0.7))
    for (words, usual), (as_usual, _) in zip(mixed, spelled(command, lambda: False), strict=True):
        told = outcome(command, words, usual)
        assert told == outcome(command, as_usual, {}), words
        assert told.count("no_va-lue of_log_level") == 1, told
    assert any("_" in flag for _, usual in mixed for flag in usual)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_secret_is_refused_with_underscores_too(command: str) -> None:
    for name in filter(is_secret, settings_class(command).model_fields):
        message = refusal(command, f"--{name}", "none")
        assert message is not None and message.startswith(f"{name} is given as a flag"), name


@pytest.mark.parametrize("flag", ["--max_num_seqz", "--no_pin_corez", "--no_max_num_seqs", "--max__num_seqs"])
def test_an_unknown_flag_is_told_as_it_was_written(flag: str) -> None:
    assert refusal("up", f"{flag}=4") == f"unrecognized arguments: {flag}=*** (see kvbaton up --help)"


@pytest.mark.parametrize(
    "text", ["--max_num_seqs", "--max_num_seqs=4", "--raw=4", "--no_pin_cores", "--json"]
)
def test_what_stands_behind_two_dashes_is_no_flag(text: str) -> None:
    """A prompt that looks like a flag is left as it is."""
    read: Any = parse(settings_class("run"), "kvbaton run", ["--max_tokens", "4", "--", text])
    assert (read.prompt, read.max_tokens, read.raw) == (text, 4, False)


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        run_command(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_each_action_of_workers_has_a_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    own = {
        "list": set(),
        "drain": {"WORKER", "--deadline-seconds", "--wait"},
        "undrain": {"WORKER"},
        "flip": {"WORKER", "ROLE", "--wait"},
        "reset-prefix-cache": set(),
        "reload-weights": {"--deadline-seconds"},
    }
    assert set(own) == set(ACTIONS)
    for action, taken in own.items():
        text = help_of(capsys, "workers", action, "--help")
        assert text.startswith(f"usage: kvbaton workers {action} [-h]")
        for word in ("WORKER", "ROLE", "--deadline-seconds", "--wait", "--role"):
            assert bool(re.search(rf"^  {word}\b", text, re.MULTILINE)) is (word in taken), (action, word)
        examples = re.findall(r"kvbaton workers ([\w-]+) ", text.partition("\n\n")[2])
        assert examples and set(examples) == {action}
        assert help_of(capsys, "workers", "--ready-file", "list", action, "-h") == text
        assert help_of(capsys, "help", "workers", action) == text
    assert "drain decode-0" in help_of(capsys, "workers", "--help")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_a_command_print_the_help_of_the_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert help_of(capsys, "help", command) == help_of(capsys, command, "--help")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("drain",), "worker is not given"),
        (("list", "decode-0"), "see kvbaton workers list --help"),
        (("drain", "decode-0", "prefill"), "see kvbaton workers drain --help"),
        (("drain", "decode-0", "--deadline", "x"), "(--deadline or KVBATON_DEADLINE_SECONDS)"),
        (("drain", "decode-0", "--dead_line", "x"), "unrecognized arguments: --dead_line"),
        (("undrain", "decode-0", "--deadline", "3"), "deadline_seconds has no effect on 'undrain'"),
        (("flip", "decode-0"), "role is ''"),
        (("reset-prefix-cache", "decode-0"), "see kvbaton workers reset-prefix-cache --help"),
        (("drian", "decode-0"), "action is 'drian'"),
    ],
)
def test_an_action_refuses_what_it_does_not_take(words: tuple[str, ...], told: str) -> None:
    with pytest.raises(SettingError) as caught:
        workers(words)
    assert told in caught.value.message
