"""The memory of this machine's GPUs, as NVIDIA's own program reports it: no process of ``up`` loads torch."""

import subprocess

_COMMAND = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_MIB = 2**20
_SECONDS = 20


def gpu_memory(visible: str | None) -> list[int] | None:
    """Return the bytes of each GPU that workers may use, in CUDA's order; None if they are unknown.

    visible: CUDA_VISIBLE_DEVICES.
    """
    try:
        run = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_memory(run.stdout, visible)


def parse_memory(report: str, visible: str | None) -> list[int] | None:
    """Return the bytes of the visible GPUs from lines of index, UUID and MiB; None if one is not in the report."""
    sizes = dict[str, int]()
    names = list[str]()
    for line in report.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3 or not fields[2].isdigit():
            return None
        index, uuid, mebibytes = fields
        sizes[index] = sizes[uuid] = int(mebibytes) * _MIB
        names.append(index)
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    found = [_size(name, sizes) for name in names]
    return None if None in found else [size for size in found if size is not None]


def _size(name: str, sizes: dict[str, int]) -> int | None:
    """Return the size of a GPU by its number, its UUID, or the beginning of a UUID."""
    if name in sizes:
        return sizes[name]
    return next(
        (size for uuid, size in sizes.items() if name.startswith("GPU-") and uuid.startswith(name)), None
    )
