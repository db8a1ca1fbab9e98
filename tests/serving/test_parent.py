"""A child that ends with its parent."""

import subprocess
import sys


def test_a_child_of_another_parent_ends_at_once() -> None:
    program = (
        "import sys\nfrom serving.signals import die_with_parent\ndie_with_parent(1 << 22)\nprint('alive')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")


def test_a_child_of_its_parent_lives_on() -> None:
    program = "import os\nfrom serving.signals import die_with_parent\ndie_with_parent(os.getppid())\nprint('alive')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "alive\n")
