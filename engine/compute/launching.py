"""Launch options that all of our Triton kernels share."""

from functools import cache
from typing import Any

import torch

_FIRST_WITH_OVERLAP = (9, 0)


@cache
def overlap_of(device: torch.device) -> dict[str, Any]:
    """Return the options with which a kernel may begin before the one ahead of it ends (programmatic dependent launch).

    overlaps is a constant of each kernel that takes them: if it is set, the kernel lets the next one begin at once, and
    waits (``gdc_wait``) before it reads what a kernel wrote, and before it writes anything. Until then it may read weights,
    and what the host copied. At least one program always waits, since a wait ends with the kernel directly ahead only.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FIRST_WITH_OVERLAP:
        return {"overlaps": False}
    from triton.language.extra import cuda

    if not hasattr(cuda, "gdc_wait"):
        return {"overlaps": False}
    return {"overlaps": True, "launch_pdl": True}
