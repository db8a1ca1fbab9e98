"""``--config``: flag over environment over file over default, and the settings that ``up`` passes to its processes."""

import logging
from pathlib import Path

import pytest

from cli.main import COMMANDS
from contract.errors import SettingError
from launch.arguments import parse
from launch.client_settings import RunSettings
from launch.command_settings import settings_class
from launch.kept_process import ProcessSpec
from launch.machine_settings import UpSettings
from launch.processes import local_processes
from launch.service_settings import RouterCommand
from serving.logs import log_settings
from tests.cli.test_command_line import refusal

EXAMPLE = Path(__file__).parents[2] / "examples" / "kvbaton.toml"
FACTS = {
    name: f"127.0.0.1:{port}" for port, name in enumerate(("internal", "http", "grpc", "admin"), start=7)
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvbaton.toml"


def up(file: Path, *arguments: str) -> UpSettings:
    return parse(UpSettings, "kvbaton up", ["--config", str(file), *arguments])


def child(settings: UpSettings, name: str) -> tuple[list[str], dict[str, str]]:
    """The argv and the ``KVBATON_*`` variables of one process."""
    specs = local_processes(settings, Path("/models/one"), Path("/private/secret"))
    spec: ProcessSpec = next(spec for spec in specs if spec.name == name)
    assert spec.env is not None
    given = {key: value for key, value in spec.env.items() if key.startswith("KVBATON_")}
    return spec.command({"router": FACTS} if name != "router" else {}), given


def test_flag_over_variable_over_file_over_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("max_num_seqs = 1\nmax_model_len = 100\nnum_threads = 1\n[up]\nmax_num_seqs = 2\n")
    monkeypatch.setenv("KVBATON_MAX_MODEL_LEN", "200")
    monkeypatch.setenv("KVBATON_NUM_THREADS", "2")
    settings = up(file, "--num-threads", "3")
    assert (settings.max_num_seqs, settings.max_model_len, settings.num_threads) == (2, 200, 3)
    assert settings.sources.origins == {
        "config": "flag",
        "max_num_seqs": f"{file}:5 [up]",
        "max_model_len": "KVBATON_MAX_MODEL_LEN",
        "num_threads": "flag",
    }


def test_the_variable_names_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[run]\nmax_tokens = 7\n")
    monkeypatch.setenv("KVBATON_CONFIG", str(file))
    assert parse(RunSettings, "kvbaton run", ["hi"]).max_tokens == 7
    assert parse(UpSettings, "kvbaton up", []).sources.origins == {"config": "KVBATON_CONFIG"}


def test_the_log_shows_the_source_of_each_setting(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text('[router]\nsecret = "hunter2"\nmax_queue = 3\n')
    file.chmod(0o600)
    caplog.set_level(logging.INFO)
    settings = parse(RouterCommand, "kvbaton router", ["--config", str(file), "--log-level", "debug"])
    log_settings(logging.getLogger(), settings)
    assert f"max_queue=3 ({file}:3 [router])" in caplog.text
    assert f"secret='***' ({file}:2 [router])" in caplog.text
    assert "log_level='debug' (flag)" in caplog.text
    assert "request_timeout_seconds=600.0 (" not in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("max_num_seqs = 0\n", "max_num_seqs is 0: .*allowed: at least 1 .*toml:1"),
        ("[up]\nhttp = 8000\n", r"http is 8000: .*toml:2 \[up\]"),
        (
            "[up]\nmax_num_seqs = true\n",
            r"max_num_seqs is true: a switch value is not allowed here, allowed: at least 1 .*\[up\]",
        ),
        (
            "[decode]\nmax_nm_seqs = 1\n",
            r"\[decode\]: 'max_nm_seqs' is not a setting .*did you mean max_num_seqs",
        ),
        ("config = 'other'\n", "'config' is not a setting of any command"),
        ("prefill = 1\n[prefill]\n", "put the numbers of workers for up into"),
        ("[up]\nprefill = 1\n", "prefill is 1 but decode is not given"),
        ("[up.x]\n", "'x' is not a setting of up"),
    ],
)
def test_a_bad_file_stops_the_process_with_one_line(file: Path, content: str, told: str) -> None:
    file.write_text(content)
    with pytest.raises(SettingError, match=told) as caught:
        up(file)
    assert "\n" not in caught.value.message
    assert "{" not in caught.value.message


def test_a_bad_secret_is_not_shown(file: Path) -> None:
    file.write_text("[router]\nsecret = 12345678\n")
    file.chmod(0o600)
    with pytest.raises(SettingError, match=r"secret is \*\*\*: Input should be a valid string") as caught:
        parse(RouterCommand, "kvbaton router", ["--config", str(file)])
    assert "12345678" not in caught.value.message


def test_a_bad_file_is_a_bad_setting_for_the_command_line(file: Path) -> None:
    assert "cannot be read" in refusal("up", "--config", str(file))


def test_up_passes_settings_to_each_process_but_not_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        "advertise_host = 'box'\nmax_num_seqs = 4\nenable_prefix_caching = false\n[up]\nmax_model_len = 64\n"
        "[router]\nmax_queue = 5\nadmin = '127.0.0.1:77'\n[decode]\nmax_num_seqs = 9\n"
    )
    monkeypatch.setenv("KVBATON_CONFIG", str(file))
    settings = parse(UpSettings, "kvbaton up", [])
    argv, given = child(settings, "prefill-0")
    assert given == {"KVBATON_ADVERTISE_HOST": "box"}
    assert argv[argv.index("--max-num-seqs") + 1] == "4"
    assert "--no-enable-prefix-caching" in argv
    argv, given = child(settings, "decode-0")
    assert given["KVBATON_MAX_NUM_SEQS"] == "9"
    assert "--max-num-seqs" not in argv
    assert argv[argv.index("--max-model-len") + 1] == "64"
    argv, given = child(settings, "router")
    assert given == {"KVBATON_MAX_QUEUE": "5", "KVBATON_ADMIN": "127.0.0.1:77"}
    assert "--admin" not in argv


def test_workers_ask_for_the_admin_keys_of_their_routers(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file names them for the routers only. A variable is passed to both anyhow."""
    file.write_text("[router]\nadmin_keys_file = '/keys'\n[decode]\nadmin_keys_file = '/own'\n")
    for process, keys in (("router", "/keys"), ("prefill-0", "/keys"), ("decode-0", "/own")):
        assert child(up(file), process)[1] == {"KVBATON_ADMIN_KEYS_FILE": keys}
    monkeypatch.setenv("KVBATON_ADMIN_KEYS_FILE", "/mine")
    for process in ("router", "prefill-0", "decode-0"):
        assert child(up(file), process)[1] == {"KVBATON_ADMIN_KEYS_FILE": "/mine"}


def test_flags_and_variables_of_up_win_over_the_table_of_a_worker(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[decode]\nmax_num_seqs = 9\ndtype = 'float32'\nadvertise_host = 'box'\n")
    monkeypatch.setenv("KVBATON_DTYPE", "bfloat16")
    monkeypatch.setenv("KVBATON_ADVERTISE_HOST", "host")
    argv, given = child(up(file, "--max-num-seqs", "3"), "decode-0")
    assert argv[argv.index("--max-num-seqs") + 1] == "3"
    assert argv[argv.index("--dtype") + 1] == "bfloat16"
    assert given == {"KVBATON_DTYPE": "bfloat16", "KVBATON_ADVERTISE_HOST": "host"}


def test_a_restarted_router_keeps_its_ports_though_the_file_names_others(file: Path) -> None:
    file.write_text("[router]\nhttp = '127.0.0.1:0'\n")
    specs = local_processes(up(file), Path("/models/one"), Path("/private/secret"))
    assert "--http" not in specs[0].command({})
    again = specs[0].command({"router": FACTS})
    assert again[again.index("--http") + 1] == FACTS["http"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[decode]\nmodel = '/other'\n", "model is '/other', but this service uses 'demo'"),
        ("[decode]\nserved_model_name = 'x'\n", "served_model_name is 'x', but this service uses None"),
        ("[router]\nsecret = 'x'\n", "secret cannot be passed to several processes; use secret_file"),
    ],
)
def test_processes_that_cannot_agree_are_refused(file: Path, content: str, told: str) -> None:
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(SettingError, match=told):
        child(up(file), "router")


def test_settings_that_up_sets_itself_are_logged_as_not_used(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text("[decode]\nrouter = '10.0.0.1:9100'\nworker_id = 'one'\n")
    argv, given = child(up(file), "decode-0")
    assert given == {}
    assert argv[argv.index("--router") + 1] == FACTS["internal"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "[decode]: router is not used" in caplog.text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reads_the_example(command: str) -> None:
    needed = {
        "run": ["hello"],
        "batch": ["--input", "in.jsonl", "--output", "out.jsonl"],
        "bench": ["--profile"],
        "autoscaler": ["--timing", "timing.json"],
    }
    arguments = ["--config", str(EXAMPLE), *needed.get(command, [])]
    settings = parse(settings_class(command), f"kvbaton {command}", arguments)
    assert any(str(EXAMPLE) in origin for origin in settings.sources.origins.values())


def test_up_runs_the_example_without_a_contradiction(caplog: pytest.LogCaptureFixture) -> None:
    _, given = child(up(EXAMPLE), "prefill-0")
    assert given["KVBATON_MAX_NUM_BATCHED_TOKENS"] == "4096"
    assert not caplog.records
