"""docs/settings.md is made from the settings classes."""

import subprocess
import sys
from pathlib import Path

import pytest

from cli.main import COMMANDS
from launch.command_settings import settings_class
from tools.generate_settings_docs import main

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_page_is_in_sync() -> None:
    command = [sys.executable, "-m", "tools.generate_settings_docs", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_stale_or_missing_page_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "settings.md"
    assert main(["--check"], page) == 1
    assert main([], page) == 0
    assert main(["--check"], page) == 0
    page.write_text(page.read_text().replace("at most 64", "at most 65", 1))
    assert main(["--check"], page) == 1
    assert "run `make settings-docs`" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_that_a_user_can_give_is_on_the_page_once(tmp_path: Path, command: str) -> None:
    page = tmp_path / "settings.md"
    main([], page)
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| `")]
    groups = ("local", "up serve demo chat run batch bench"), ("worker", "prefill decode both")
    words = {
        "all",
        f"`{command}`",
        *(f"*{group}*" for group, members in groups if command in members.split()),
    }
    of_command = [row[0].split("`")[1] for row in rows if words & set(row[1].split(", "))]
    hidden = {"ready_fd", "parent_pid", "num_restarts"}
    assert sorted(of_command) == sorted(settings_class(command).model_fields.keys() - hidden)


def test_a_row_has_name_commands_range_default_and_meaning(tmp_path: Path) -> None:
    page = tmp_path / "settings.md"
    main([], page)
    text = page.read_text()
    assert (
        "| `prefill` | *local*, `compose` | integer, at least 0, at most 64 | unset | Number of prefill"
        in text
    )
    assert "| `prompt` (as PROMPT) | `run` | text | required | The prompt. |" in text
    assert "| `api_key` (no flag) |" in text and "| `config` (not in a file) | all |" in text
