"""Put the tensors of a checkpoint into a model."""

from collections.abc import Callable

import torch
from torch import nn

from engine.models.checkpoint import TensorPart, Weights, check_tensors
from engine.models.load_progress import LoadProgress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _whole(name: str) -> TensorPart | None:
    """Select all of every tensor."""
    return None


def load_weights(
    model: nn.Module,
    checkpoint: Weights,
    device: torch.device,
    part_of: Callable[[str], TensorPart | None] = _whole,
) -> None:
    """Replace each parameter of ``model`` (usually on the meta device) by the checkpoint's tensor, in the parameter's dtype.

    part_of: the part of a tensor to read by its name; None is all of it.

    Each tensor is read once and put in place before the next. On the host, weights already in that dtype stay backed by the
    memory map, so that several workers of one machine share them; they are read at first use. Raises SettingError that names
    missing, unexpected and misshapen tensors, and numbers without their scale, before anything is read.
    """
    wanted = dict(model.named_parameters())
    parts = {name: part_of(name) for name in wanted}
    shapes = {
        name: list(wanted[name].shape) if part is None else part.whole_shape(wanted[name].shape)
        for name, part in parts.items()
    }
    have_scales = {name for name in wanted if wanted[name].dtype.itemsize == 1}
    check_tensors(shapes, checkpoint, have_scales)
    num_bytes = sum(parameter.nbytes for parameter in wanted.values())
    with LoadProgress(num_bytes) as progress:
        for name, part in parts.items():
            tensor = checkpoint.tensor(name) if part is None else checkpoint.part(name, part)
            owner = model.get_submodule(name.rpartition(".")[0])
            loaded = tensor.to(device=device, dtype=wanted[name].dtype).contiguous()
            owner.register_parameter(name.rpartition(".")[2], nn.Parameter(loaded, requires_grad=False))
            progress.advance(loaded.nbytes)
