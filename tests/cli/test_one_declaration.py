"""A worker setting is declared in one place, from which everything else is derived."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = (*PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], "tools")
DECLARATION = '''
    max_made_up: int = Field(default=7, ge=1, le=99)
    """A setting that only a test has."""
'''
SCRIPT = """
import json, sys
from pathlib import Path

from launch.arguments import parse
from launch.processes import local_processes
from launch.machine_settings import UpSettings
from launch.service_settings import DecodeCommand
from contract.errors import SettingError
from tools.generate_settings_docs import render

def decode(*flags):
    return parse(DecodeCommand, "kvbaton decode", flags)

def refusal(*flags):
    try:
        decode(*flags)
    except SettingError as error:
        return error.message

up = parse(UpSettings, "kvbaton up", ["--max-made-up", "9"])
_, prefill, _ = local_processes(up, Path("model"), Path("secret"))
print(json.dumps({
    "flag": decode("--max-made-up", "3").engine_settings().max_made_up,
    "default or variable": decode().engine_settings().max_made_up,
    "file": decode("--config", sys.argv[1]).engine_settings().max_made_up,
    "refusal": refusal("--max-made-up", "100"),
    "up": prefill.command({"router": {"internal": "127.0.0.1:1"}}),
    "rows": [line for line in render().splitlines() if line.startswith("| `max_made_up`")],
}))
"""


def run(copy: Path, *arguments: str, **environment: str) -> str:
    variables = {"PYTHONPATH": str(copy), "COLUMNS": "200", **environment}
    done = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, *arguments],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def test_a_new_setting_of_a_worker_is_one_edit_in_one_file(tmp_path: Path) -> None:
    """Issue 25: it appears as flag, variable and TOML key, in ``up``, in the engine, in the help and in the docs."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    options = tmp_path / "engine" / "options.py"
    before = options.read_text()
    head = "class BatchingOptions(Options):"
    _, docstring, _ = before.partition(head)[2].split('"""', 2)
    place = f'{head}\n    """{docstring}"""\n'
    assert place in before
    options.write_text(before.replace(place, place + DECLARATION))
    (tmp_path / "file.toml").write_text("[decode]\nmax_made_up = 5\n")

    found = json.loads(run(tmp_path, "-c", SCRIPT, "file.toml"))
    assert (found["flag"], found["default or variable"], found["file"]) == (3, 7, 5)
    assert "max_made_up is '100'" in found["refusal"] and "at least 1, at most 99" in found["refusal"]
    assert found["up"][found["up"].index("--max-made-up") + 1] == "9"
    (row,) = found["rows"]  # of all commands that start workers, and of those that run one
    assert row.startswith("| `max_made_up` | *local*, *worker* | integer, at least 1, at most 99 | `7` |")
    by_variable = json.loads(run(tmp_path, "-c", SCRIPT, "file.toml", KVBATON_MAX_MADE_UP="4"))
    assert (by_variable["flag"], by_variable["default or variable"], by_variable["file"]) == (3, 4, 4)
    assert "A setting that only a test has." in run(tmp_path, "-m", "cli.main", "up", "--help")
