"""The device that an engine runs on."""

import torch

from contract.errors import SettingError

DEVICES = ("auto", "cpu", "cuda")


def resolve_device(setting: str, num_cuda_devices: int, rocm: str | None = torch.version.hip) -> torch.device:
    """Return the device of this setting; "auto" is the first CUDA device if there is one, else the CPU.

    "cuda" means "cuda:0". Raises SettingError for an unknown or missing device, and for an AMD GPU.

    rocm: the version of ROCm that this build of torch is for, whose devices it calls CUDA devices as well.
    """
    kind, _, index = setting.partition(":")
    if kind not in DEVICES or (index and not (kind == "cuda" and index.isdigit())):
        raise SettingError(
            f"device is {setting!r}; choose one of {', '.join(DEVICES)}, or cuda:N", param="device"
        )
    if kind == "cpu" or (kind == "auto" and num_cuda_devices == 0):
        return torch.device("cpu")
    if rocm is not None:
        raise SettingError(
            f"device is {setting!r}, and this build of torch is for AMD GPUs (ROCm {rocm}), which are not supported: "
            "use device cpu, or a build of torch for CUDA",
            param="device",
        )
    if int(index or 0) >= num_cuda_devices:
        raise SettingError(
            f"device is {setting!r}, but this machine (or this build of torch) has {num_cuda_devices} CUDA devices; "
            "use cpu or auto",
            param="device",
        )
    return torch.device("cuda", int(index or 0))
