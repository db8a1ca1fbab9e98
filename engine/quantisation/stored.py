"""A checkpoint with quantised weights, as a model reads it: each weight under its plain name, dequantised when it is read.

``read_scheme`` and ``open_weights`` decide for the loader and for ``kvbaton check`` alike what is served, from config.json
and the headers of the files, before a weight is read.
"""

from collections.abc import Callable, Mapping, Set
from math import prod
from typing import TYPE_CHECKING

from engine.fp8.scheme import Fp8Scheme
from engine.fp8.stored import Fp8Checkpoint
from engine.models.checkpoint import PLAIN_DTYPES, STORED_NAMES, Checkpoint, Weights, bad_model, resolve_dtype
from engine.models.config import RawConfig
from engine.quantisation.formats import bitsandbytes, compressed_tensors, fp8, gptq, mxfp4
from engine.quantisation.scheme import PLACE, Fields, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from engine.models.sharding import Part

AnyScheme = Scheme | Fp8Scheme
READERS: Mapping[str, Callable[[Fields], AnyScheme]] = {
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "awq": gptq.read_awq,
    "gptq": gptq.read,
    "auto-round": gptq.read_auto_round,
    "mxfp4": mxfp4.read,
    "bitsandbytes": bitsandbytes.read,
}
"""The reader of each ``quant_method``."""
CHUNK_NUMBERS = 2**22
"""Numbers that are dequantised at a time: what is needed beside a weight stays below about 100 MB."""
_STORED_NAMES = {name: stored for stored, name in STORED_NAMES.items()}
# The last parts of names that stand beside numbers of few bits: without a weight, something is missing or damaged.
_PARTS = frozenset(
    """SCB absmax g_idx input_global_scale input_scale nested_absmax nested_quant_map quant_map qweight qzeros scales
    weight_format weight_g_idx weight_global_scale weight_packed weight_scale weight_scale_2 weight_scale_inv weight_shape
    weight_zero_point""".split()
)


class QuantisedCheckpoint:
    """The weights of one folder by name, in 16 or 32 bits; see ``Checkpoint`` and ``Weights``.

    dtype: that of the dequantised weights. A weight is computed some rows at a time, so that little more than the result is
    needed; chunk_numbers: of as many numbers.

    Raises SettingError for a checkpoint that is stored otherwise than its scheme requires.
    """

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme, chunk_numbers: int = CHUNK_NUMBERS) -> None:
        self.is_bare = checkpoint.is_bare
        self.scheme = scheme
        self.dtype = "float32"
        self._checkpoint = checkpoint
        self._chunk_numbers = chunk_numbers
        stored = checkpoint.names()
        self._coded = scheme.find(checkpoint)
        if not self._coded:
            raise bad_model(f"config.json has a {PLACE}, and no weight in the checkpoint is quantised so")
        hidden = {part for weight in self._coded.values() for part in weight.parts}
        self._others = {name for name in stored - hidden if not scheme.is_unused(name)}
        layers = {name.removesuffix(".weight") for name in self._coded}
        if wrong := sorted(layers & scheme.ignored):
            raise bad_model(f"layer {wrong[0]} is quantised, and the list of layers that are not names it")
        for name in sorted(self._others):
            if name in self._coded:
                raise bad_model(f"tensor {name} is stored twice, with and without quantisation")
            self._check_other(name)

    def names(self) -> Set[str]:
        """Return the names of all tensors."""
        return self._others | set(self._coded)

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of what ``tensor`` returns, as safetensors names it."""
        return _STORED_NAMES[self.dtype] if name in self._coded else self._checkpoint.stored_dtype(name)

    def shape(self, name: str) -> list[int]:
        """Return the tensor's shape."""
        coded = self._coded.get(name)
        return self._checkpoint.shape(name) if coded is None else coded.shape

    def tensor(self, name: str) -> "Tensor":
        """Return the tensor on the host."""
        if name not in self._coded:
            return self._checkpoint.tensor(name)
        return self._dequantised(name, 0, slice(0, self.shape(name)[0]))

    def part(self, name: str, part: "Part") -> "Tensor":
        """Return a part of the tensor on the host."""
        if name not in self._coded:
            return self._checkpoint.part(name, part)
        return part.assemble(lambda own: self._dequantised(name, part.dim, own))

    def first_dtype(self) -> str:
        """Return the dtype of the tensor whose name sorts first among those that are not quantised."""
        plain = [name for name in self._others if self._checkpoint.stored_dtype(name) in PLAIN_DTYPES]
        return self._checkpoint.named_dtype(min(plain)) if plain else "float32"

    def is_spare(self, name: str) -> bool:
        """Return whether a model can be without a tensor: a bias of zeros, as AutoGPTQ writes to layers that have none."""
        layer, _, kind = name.rpartition(".")
        is_of_quantised = kind == "bias" and f"{layer}.weight" in self._coded
        return is_of_quantised and self._checkpoint.is_zero(name)

    def _dequantised(self, name: str, dim: int, own: slice) -> "Tensor":
        """Return a range of a weight along a dimension."""
        import torch

        coded = self._coded[name]
        rows = own if dim == 0 else slice(0, coded.shape[0])
        cut = () if dim == 0 else ((slice(None),) * dim + (own,))
        shape = list(coded.shape)
        shape[dim] = own.stop - own.start
        whole = torch.empty(shape, dtype=getattr(torch, self.dtype))
        step = max(1, self._chunk_numbers // prod(coded.shape[1:]))
        for first in range(rows.start, rows.stop, step):
            end = min(first + step, rows.stop)
            whole[first - rows.start : end - rows.start] = coded.rows(first, end)[cut]
        return whole

    def _check_other(self, name: str) -> None:
        """Raise SettingError for a tensor that belongs to a quantised weight that is not there, or lacks its scale."""
        kind = name.rpartition(".")[2]
        if kind in _PARTS:
            raise bad_model(f"tensor {name} belongs to no weight that {PLACE} describes")
        dtype = self._checkpoint.stored_dtype(name)
        if kind == "weight" and dtype not in PLAIN_DTYPES:
            raise bad_model(f"tensor {name} is stored as {dtype}, and {PLACE} describes no such numbers")


def read_scheme(raw: RawConfig) -> AnyScheme | None:
    """Return the scheme in config.json, None without quantisation. Raises SettingError for one that is not served."""
    values = raw.get(PLACE)
    if not values:
        return None
    config = Fields(PLACE, values)
    return READERS[config.require("quant_method", *READERS)](config)


def open_weights(
    checkpoint: Checkpoint, scheme: AnyScheme | None, raw: RawConfig, dtype: str
) -> tuple[Weights, str]:
    """Return the weights as a model reads them, and the dtype to compute in. scheme: of ``raw``. dtype: the setting.

    Raises SettingError for tensors that do not have the form that the scheme requires.
    """
    if scheme is None:
        return checkpoint, resolve_dtype(dtype, raw, checkpoint)
    if isinstance(scheme, Fp8Scheme):
        multiplied = Fp8Checkpoint(checkpoint, scheme)
        return multiplied, resolve_dtype(dtype, raw, multiplied)
    weights = QuantisedCheckpoint(checkpoint, scheme)
    weights.dtype = resolve_dtype(dtype, raw, weights)
    return weights, weights.dtype


def describe_weights(scheme: AnyScheme | None, dtype: str | None, *, is_own: bool) -> str | None:
    """Return the quantisation of a model that is served, for people; None without. is_own: our own decoder computes it."""
    if scheme is None:
        return None
    name = "FP8 (compressed-tensors)" if isinstance(scheme, Fp8Scheme) else scheme.describe()
    if isinstance(scheme, Fp8Scheme) and is_own:
        return name  # whether it is multiplied as FP8 depends on the device and on a setting
    return f"{name}, dequantised{f' to {dtype}' if dtype else ''} at load"
