"""The settings of ``kvbaton compose``."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from contract.errors import SettingError
from contract.identity import Role
from engine.options import RankOptions
from launch.devices import parse_devices
from launch.scaling_settings import AutoscaleSettings
from launch.settings import LogLevel


def _check_output(path: Path) -> Path:
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError("it must be a file in an existing, writable folder")
    return path


class ComposeSettings(RankOptions, AutoscaleSettings):
    """Write a Docker Compose file: a router, workers on the CPU (profile cpu) or on GPUs (gpu), and monitoring.

    The images are built from this checkout, which the file refers to. Without lists of GPUs the workers take GPU 0, 1, ...
    With --autoscale a service of the file starts and removes workers as the load changes; lists of GPUs are then those
    that a role may take (docs/autoscaling.md).

    Examples:
      kvbaton compose --prefill 1 --decode 2
      kvbaton compose --prefill-devices 0,1 --decode-devices 2-7 --model models/llama
      kvbaton compose --prefill-devices 0-3 --decode-devices 4-7 --tensor-parallel-size 2
      kvbaton compose --autoscale --prefill-devices 0,1 --decode-devices 2-7 --timing timing.json --ttft-goal-ms 500
    """

    output: Annotated[Path, AfterValidator(_check_output)] = Path("compose.yaml")
    """File to write."""
    overwrite: bool = False
    """Replace an existing file."""
    log_level: LogLevel = "error"
    """Lowest level of the log records that are written."""

    def places(self) -> dict[Role, list[int]]:
        """Return the places of each role's largest pool: on place k, a worker has the GPUs from k * tensor_parallel_size on.

        Raises SettingError for lists of GPUs that cannot be divided so, or that contradict the numbers of workers.
        """
        if (self.prefill_devices is None) is not (self.decode_devices is None):
            missing = "prefill_devices" if self.prefill_devices is None else "decode_devices"
            raise SettingError(
                f"{missing} is not set: list the GPUs of both roles, or of none", param=missing
            )
        if self.prefill_devices is None or self.decode_devices is None:
            _refuse_empty(self.most_prefill, "prefill")
            _refuse_empty(self.most_decode, "decode")
            places = list(range(self.most_prefill + self.most_decode))
            return {Role.PREFILL: places[: self.most_prefill], Role.DECODE: places[self.most_prefill :]}
        prefill = self._listed("prefill", self.prefill_devices, self.prefill, self.max_prefill)
        decode = self._listed("decode", self.decode_devices, self.decode, self.max_decode)
        if both := set(prefill) & set(decode):
            gpu = min(both) * self.tensor_parallel_size
            raise SettingError(f"decode_devices has GPU {gpu}, as prefill_devices", param="decode_devices")
        return {Role.PREFILL: prefill, Role.DECODE: decode}

    def _listed(self, role: str, text: str, number: int | None, most: int | None) -> list[int]:
        """Return the places of the workers of a role whose GPUs are listed.

        number, most: of its workers, if they are given.
        """
        name = f"{role}_devices"
        size = self.tensor_parallel_size
        devices = parse_devices(text)
        groups = [devices[first : first + size] for first in range(0, len(devices), size)]
        for group in groups:
            if group[0] % size or group != list(range(group[0], group[0] + size)):
                shown = ", ".join(map(str, group))
                raise SettingError(
                    f"{name} has {shown} for one worker: with tensor_parallel_size {size} its GPUs are {size} side by"
                    f" side, the first one a multiple of {size}",
                    param=name,
                )
        if not self.autoscale:
            _refuse_empty(number, role)
        fixed = most if self.autoscale else number
        if fixed is not None and fixed != len(groups):
            param, text = self.greatest_given_by(role) if self.autoscale else (role, str(number))
            raise SettingError(
                f"{param} is {text}, and {name} has GPUs for {len(groups)} workers", param=param
            )
        if number is not None and number > len(groups):
            raise SettingError(
                f"{role} is {number}, and {name} has GPUs for {len(groups)} workers", param=role
            )
        return [group[0] // size for group in groups]


def _refuse_empty(number: int | None, role: str) -> None:
    if number == 0:
        raise SettingError(f"{role} is 0; the file has workers of both roles", param=role)
