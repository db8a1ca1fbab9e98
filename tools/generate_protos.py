"""Generate ``protos/*_pb2*`` and the client's copy of the public ones, or check that the committed ones are in sync.

The generator runs in a separate process, since its plugins use the global protobuf registry.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = Path("clients/python/kvbaton_client/protos")
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(target: Path) -> None:
    """Write the generated code of every proto below ``target``; raises CalledProcessError with protoc's message."""
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    plugins = [
        f"--plugin={name}={Path(sys.executable).parent / name}"
        for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *plugins, *outputs, *protos]
    subprocess.run(command, cwd=ROOT, check=True)
    _generate_client(target)


def _generate_client(target: Path) -> None:
    """Write the public API's code into the client's package, which is installed without ``protos``."""
    folder = target / CLIENT
    folder.mkdir(parents=True, exist_ok=True)
    for path in (target / "protos").glob("inference_pb2*.py*"):
        code = path.read_text().replace("from protos import", "from kvbaton_client.protos import")
        (folder / path.name).write_text(
            code.replace("'protos.inference_pb2'", "'kvbaton_client.protos.inference_pb2'")
        )


def generated_files(root: Path) -> dict[str, bytes]:
    """Return path → content of the generated code below ``root``."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for folder in (Path("protos"), CLIENT)
        for pattern in PATTERNS
        for path in (root / folder).glob(pattern)
    }


def differences() -> list[str]:
    """Return the names of generated files that are missing, obsolete or out of date."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = generated_files(Path(folder))
        committed = generated_files(ROOT)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main(arguments: list[str]) -> int:
    """Generate in place, or with ``--check`` only compare."""
    if arguments != ["--check"]:
        generate(ROOT)
        return 0
    stale = differences()
    if stale:
        print(f"the generated code is out of sync ({', '.join(stale)}): run `make protos`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
