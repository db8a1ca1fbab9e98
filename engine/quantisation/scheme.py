"""The parts of every format: fields of config.json, a scheme that finds layers by what is stored, and a weight of few bits.

Which layers are quantised is decided by the tensors, as in ADR 0028: a layer that stores numbers of few bits must have the
tensors, shapes and dtypes that config.json describes. Patterns of names in another one's file are never evaluated. All of
this needs names, shapes and dtypes alone, and neither torch nor weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from contract.errors import SettingError
from engine.models.checkpoint import PLAIN_DTYPES, Checkpoint, bad_model
from engine.models.config import bad_config

if TYPE_CHECKING:
    from torch import Tensor

PLACE = "quantization_config"
_FormT = TypeVar("_FormT")
INTEGERS = frozenset({"I32"})
BYTES = frozenset({"U8"})


class Fields:
    """A mapping of config.json, and its place there. Raises SettingError if it is no mapping."""

    def __init__(self, place: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise bad_config(f"{place} is {values!r:.80}; it must be an object")
        self.place = place
        self.values: Mapping[str, Any] = values

    def require(self, name: str, *served: object) -> Any:
        """Return a field. Raises SettingError unless it has one of these values; None also stands for a missing field."""
        value = self.values.get(name)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in served):
            shown = " or ".join(repr(one) for one in served if one is not None)
            raise self.refused(name, f"only {shown or None} is served")
        return value

    def group_size(self, name: str, default: int | None = None) -> int | None:
        """Return the number of inputs that share a scale, None for all of a row (-1). Raises SettingError."""
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            raise self.refused(name, "it must be a whole number above 0, or -1")
        return None if value == -1 else value

    def block(self, name: str) -> tuple[int, int]:
        """Return the rows and columns of a block, also of one that is written as "128x128". Raises SettingError."""
        sizes = self.values.get(name)
        if isinstance(sizes, str):
            sizes = [int(each) if each.isdecimal() else 0 for each in sizes.split("x")]
        right = [
            each for each in sizes or () if isinstance(each, int) and not isinstance(each, bool) and each > 0
        ]
        if not isinstance(sizes, list) or len(sizes) != 2 or len(right) != 2:
            raise self.refused(name, "it must be two whole numbers above 0")
        return sizes[0], sizes[1]

    def names(self, name: str) -> frozenset[str]:
        """Return a list of layers' names, without its patterns. Raises SettingError if it is no such list."""
        found = self.values.get(name) or []
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.refused(name, "it must be a list of names")
        return frozenset(each for each in found if not each.startswith("re:"))

    def refused(self, name: str, why: str) -> SettingError:
        """Return the error for one field."""
        return bad_config(f"{self.place}.{name} is {self.values.get(name)!r:.80}; {why}")


class CodedWeight(ABC):
    """A weight of few bits in a checkpoint. Reads nothing until ``rows`` is called.

    shape: of the numbers that it stands for. parts: the names of the stored tensors that it is made of.
    """

    def __init__(
        self, checkpoint: Checkpoint, place: str, kinds: Collection[str], shape: Sequence[int]
    ) -> None:
        """Make the weight of the tensors ``place.kind`` of a checkpoint."""
        self.shape = list(shape)
        self.parts = frozenset(f"{place}.{kind}" for kind in kinds)
        self._checkpoint = checkpoint
        self._place = place

    @abstractmethod
    def rows(self, first: int, end: int) -> "Tensor":
        """Return the numbers of some rows, float32 ``[end - first, *shape[1:]]``.

        Raises SettingError for a scale that is no number, and for the order of inputs that names no group.
        """

    def _stored(self, kind: str) -> "Tensor":
        """Return a tensor as it is stored, backed by the memory map."""
        return self._checkpoint.tensor(f"{self._place}.{kind}")

    def _finite(self, kind: str, values: "Tensor") -> "Tensor":
        """Return scales in float32. Raises SettingError if one is no number."""
        scale = values.float()
        if not bool(scale.isfinite().all()):
            raise bad_model(f"tensor {self._place}.{kind} has values that are no scales")
        return scale

    def _group_of_input(self, kind: str, num_groups: int) -> "Tensor":
        """Return the group of each input, ``[num_inputs]``, as a tensor of int64 that is stored as ``kind``."""
        index = self._stored(kind).long()
        if bool(((index < 0) | (index >= num_groups)).any()):
            raise bad_model(f"tensor {self._place}.{kind} names groups outside 0..{num_groups - 1}")
        return index


class Scheme(ABC):
    """The form of weights that config.json describes. ignored: names of layers that must not be quantised."""

    def __init__(self, ignored: frozenset[str]) -> None:
        self.ignored = ignored

    @abstractmethod
    def describe(self) -> str:
        """Return its name for people, such as "int4 in groups of 128 (awq)"."""

    @abstractmethod
    def find(self, checkpoint: Checkpoint) -> dict[str, CodedWeight]:
        """Return the quantised weights by the names that they would have in 16 bits.

        Raises SettingError for a layer that is stored otherwise than the scheme requires.
        """

    def is_unused(self, name: str) -> bool:
        """Return whether a tensor belongs to no weight, and is not read."""
        return False


def layers_of(checkpoint: Checkpoint) -> dict[str, set[str]]:
    """Return the last parts of the tensors' names, by what stands before them."""
    layers: dict[str, set[str]] = {}
    for name in sorted(checkpoint.names()):
        layer, _, kind = name.rpartition(".")
        layers.setdefault(layer, set()).add(kind)
    return layers


def only_fitting(
    layer: str,
    place: str,
    forms: Iterable[_FormT],
    same: Callable[[_FormT], Hashable],
    check: Callable[[_FormT], CodedWeight],
) -> CodedWeight:
    """Return a layer's weight in the one form that what is stored fits; ``check`` raises SettingError for each other one.

    place: where config.json has the forms. same: equal for forms that mean the same for a layer that both fit. Raises
    SettingError if none fits, or several that mean different numbers.
    """
    problems: list[SettingError] = []
    fitting: dict[Hashable, CodedWeight] = {}
    for form in forms:
        try:
            fitting[same(form)] = check(form)
        except SettingError as error:
            problems.append(error)
    if not fitting:
        raise problems[0]
    if len(fitting) > 1:
        raise bad_model(f"layer {layer} is stored as several of the {place} describe it")
    return next(iter(fitting.values()))


def expect(
    checkpoint: Checkpoint,
    name: str,
    shapes: Sequence[Sequence[int]] | None = None,
    dtypes: Collection[str] = PLAIN_DTYPES,
) -> None:
    """Raise SettingError unless a tensor is stored in one of these shapes (None: any) and dtypes."""
    if name not in checkpoint.names():
        raise bad_model(f"tensor {name} is missing; the numbers of its layer mean nothing without it")
    if shapes is not None and checkpoint.shape(name) not in [list(shape) for shape in shapes]:
        shown = " or ".join(str(list(shape)) for shape in shapes)
        raise bad_model(f"tensor {name} is {checkpoint.shape(name)}; {PLACE} requires {shown}")
    if (dtype := checkpoint.stored_dtype(name)) not in dtypes:
        raise bad_model(f"tensor {name} is stored as {dtype}; {PLACE} requires {' or '.join(sorted(dtypes))}")


def matrix_shape(checkpoint: Checkpoint, name: str) -> list[int]:
    """Return the shape of a stored matrix. Raises SettingError unless it has two dimensions, neither of them 0."""
    shape = checkpoint.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise bad_model(f"tensor {name} is {shape}; quantised weights have two dimensions above 0")
    return shape


def ceil_divide(number: int, size: int) -> int:
    """Return how many groups of ``size`` hold ``number``; the last one may have fewer."""
    return -(-number // size)
