"""Writes the addresses of all processes to a file, for scripts and tests; the file is replaced atomically."""

import json
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from contract.identity import Role
from launch.spec import Facts, ProcessSpec


def write_ready_file(
    path: Path | None,
    specs: Sequence[ProcessSpec],
    running: Collection[str],
    known: Mapping[str, Facts],
) -> None:
    """Replace ``path`` atomically; None writes nothing.

    running: names of the processes that are ready now. known: facts of all processes that were ever ready.

    Content: ``{"http", "grpc", "processes": [{"name", "role", "pid", "admin"}]}``, the first router's addresses and the
    running processes in the order of ``specs``; routers also have "http" and "grpc".
    """
    if path is None:
        return
    router = next((known[spec.name] for spec in specs if spec.role is Role.ROUTER and spec.name in known), {})
    ready = [(spec, known[spec.name]) for spec in specs if spec.name in running]
    processes = [
        {"name": spec.name, "role": spec.role.value, "pid": facts["pid"], "admin": facts["admin"]}
        | ({"http": facts["http"], "grpc": facts["grpc"]} if spec.role is Role.ROUTER else {})
        for spec, facts in ready
    ]
    content = {"http": router.get("http"), "grpc": router.get("grpc"), "processes": processes}
    _replace(path, json.dumps(content, indent=2) + "\n")


def remove_ready_file(path: Path | None) -> None:
    """Remove the file, so that it does not stand for a running service."""
    if path is not None:
        path.unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as stream:
        stream.write(text)
    Path(name).replace(path)
