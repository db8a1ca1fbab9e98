"""Experts in MXFP4 as gpt-oss stores them: FP4 in blocks of 32, each with a power of two (OCP MX v1.0).

``NAME_blocks [num_experts, num_outputs, num_blocks, 16]`` has two numbers in each byte, the lower half first, and
``NAME_scales [num_experts, num_outputs, num_blocks]`` has exponents plus 127. The weight has the name NAME and, as
transformers keeps experts of this family, inputs before outputs.
"""

from typing import TYPE_CHECKING

from engine.models.checkpoint import Checkpoint, bad_model
from engine.quantisation.scheme import BYTES, CodedWeight, Fields, Scheme, expect

if TYPE_CHECKING:
    from torch import Tensor

_BLOCKS = "_blocks"
_BYTES_OF_BLOCK = 16
_BIAS = 127
_NAN = 255


class Mxfp4Scheme(Scheme):
    """Experts in blocks."""

    def describe(self) -> str:
        """See Scheme."""
        return "MXFP4 (mxfp4)"

    def find(self, checkpoint: Checkpoint) -> dict[str, CodedWeight]:
        """See Scheme."""
        stored = sorted(name for name in checkpoint.names() if name.endswith(_BLOCKS))
        return {
            name.removesuffix(_BLOCKS): _weight(checkpoint, name.removesuffix(_BLOCKS)) for name in stored
        }


class _Weight(CodedWeight):
    """The weights of one product of all experts of a layer; a row is an expert."""

    def rows(self, first: int, end: int) -> "Tensor":
        """See CodedWeight."""
        import torch

        from engine.quantisation.numbers import fp4

        exponents = self._checkpoint.tensor(f"{self._place}_scales")[first:end]
        if bool((exponents == _NAN).any()):
            raise bad_model(f"tensor {self._place}_scales has values that are no scales")
        values = fp4(self._checkpoint.tensor(f"{self._place}{_BLOCKS}")[first:end])
        whole = torch.ldexp(values, exponents[..., None].int() - _BIAS)
        return whole.flatten(-2).transpose(1, 2)


def read(config: Fields) -> Mxfp4Scheme:
    """Return the scheme of ``quant_method`` "mxfp4"."""
    return Mxfp4Scheme(config.names("modules_to_not_convert"))


def _weight(checkpoint: Checkpoint, name: str) -> CodedWeight:
    blocks = f"{name}{_BLOCKS}"
    expect(checkpoint, blocks, None, BYTES)
    shape = checkpoint.shape(blocks)
    if len(shape) != 4 or 0 in shape or shape[-1] != _BYTES_OF_BLOCK:
        raise bad_model(f"tensor {blocks} is {shape}; MXFP4 has experts, outputs and blocks of 16 bytes")
    expect(checkpoint, f"{name}_scales", [shape[:-1]], BYTES)
    weight = _Weight(checkpoint, name, (), [shape[0], shape[2] * 2 * _BYTES_OF_BLOCK, shape[1]])
    weight.parts = frozenset({blocks, f"{name}_scales"})
    return weight
