"""The CUDA image on an engine without GPUs: what its workers need beside a GPU is there, and may be used."""

import pytest

from tests.docker.stack import BUILD_SECONDS, FOLDER, docker, require_engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(2400)]

IMAGE = "kvbaton-test-cuda"
KERNELS = "/run/kvbaton/kernels"
COMPILE = f"""
import importlib.util, subprocess, sysconfig
source = "{KERNELS}/launcher.c"
open(source, "w").write('''
#include <Python.h>
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "launcher", NULL, -1, NULL}};
PyMODINIT_FUNC PyInit_launcher(void) {{ return PyModule_Create(&module); }}
''')
library = source.replace(".c", ".so")
subprocess.run(["cc", "-shared", "-fPIC", "-I", sysconfig.get_path("include"), source, "-o", library], check=True)
spec = importlib.util.spec_from_file_location("launcher", library)
importlib.util.module_from_spec(spec)
"""
NIXL = """
from nixl_cu13._api import nixl_agent, nixl_agent_config
nixl_agent("alone", nixl_agent_config(backends=["UCX"]))
"""


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    require_engine()
    options = ("--target", "worker", "--build-arg", "TORCH_BUILD=cuda", "-t", IMAGE)
    docker("build", "-q", "-f", "Dockerfile", *options, str(FOLDER.parent), timeout_seconds=BUILD_SECONDS)


def python(program: str) -> str:
    """Run a program as a worker of the compose file is run: nothing but the volume of kernels can be written."""
    limits = ("--rm", "--read-only", "--network", "none", "--tmpfs", "/tmp:noexec", "-v", KERNELS)
    return docker("run", *limits, "--entrypoint", "python", IMAGE, "-c", program)


def test_the_host_side_of_a_kernel_is_compiled_and_loaded() -> None:
    """Triton does that when a worker starts, against the headers of the image's Python."""
    python(COMPILE)


def test_nixl_starts_with_ucx() -> None:
    python(NIXL)
