"""Temporary folders of a process, those that a killed one has left, and a child that ends with its parent."""

import subprocess
import sys
from pathlib import Path

from contract.processes import RunFolder

HOLDS = """
import sys
from pathlib import Path
from contract.processes import RunFolder
folder = RunFolder("kind", Path(sys.argv[1]))
(folder.path / "socket").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_ends_with_its_block(tmp_path: Path) -> None:
    with RunFolder("kind", tmp_path) as folder:
        (folder.path / "file").touch()
        assert folder.path.name.startswith("kvbaton-kind-")
        assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        with RunFolder("kind", tmp_path) as own, RunFolder("kin", tmp_path):
            RunFolder("kind", tmp_path).close()
            assert held.exists()
            assert own.path.exists()
        process.kill()
    assert (held / "socket").exists()
    with RunFolder("kind", tmp_path):
        assert not held.exists()


def test_what_is_no_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "kvbaton-kind-file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kvbaton-kind-link").symlink_to(tmp_path / "elsewhere")
    RunFolder("kind", tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_child_of_another_parent_ends_at_once() -> None:
    program = (
        "import sys\nfrom contract.processes import die_with_parent\ndie_with_parent(1 << 22)\nprint('alive')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")


def test_a_child_of_its_parent_lives_on() -> None:
    program = "import os\nfrom contract.processes import die_with_parent\ndie_with_parent(os.getppid())\nprint('alive')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "alive\n")
