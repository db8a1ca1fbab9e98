"""Copies of production objects, so that the explorer can go back, and a name for each of their states.

``fork`` copies the mutable part of an object graph; ``freeze`` gives equal values for states that behave alike. Both
walk plain attributes, so a new attribute needs no change here. All copies share what only counts, estimates, waits or is
called back (locks, counters, expected arrivals, shares of a step, ports, deadlines, settings, tables that never change), and
queues, which are empty between two calls: it is no part of a state.
"""

import asyncio
import dataclasses
import threading
from collections import OrderedDict, defaultdict
from enum import Enum
from functools import cache, partial
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, TypeVar

import msgspec
import numpy as np

from contract.requests import EngineRequest
from engine.scheduling.batch.fair_steps import FairSteps
from engine.scheduling.waits.waits import Deadlines
from kv_transfer.control.fetch_effects import ArrivalEstimates, FetchPorts
from kv_transfer.counters import Counters
from kv_transfer.settings import LocalWorker
from router.workers.order_stream import OrderStream
from tests.protocol.sink import Sink
from worker.router_sessions import Accepted

_T = TypeVar("_T")
_COPIED_PACKAGES = (
    "decode_service.",
    "engine.",
    "kv_transfer.",
    "prefill_service.",
    "router.",
    "tests.protocol.",
    "worker.",
)
_SHARED: tuple[type, ...] = (
    ArrivalEstimates,
    Counters,
    Deadlines,
    FairSteps,
    FetchPorts,
    LocalWorker,
    MappingProxyType,
    OrderStream,
    Sink,
    asyncio.Queue,
    asyncio.Semaphore,
)
_NAMELESS = (type(threading.Lock()), FunctionType, MethodType, partial)


def fork(root: _T) -> _T:
    """Copy ``root``; the copy shares nothing mutable with it but what all copies share."""
    copied: _T = _Forking().copy(root)
    return copied


def freeze(root: Any) -> Any:
    """Return a hashable value, equal for two graphs of the same shape and content."""
    return _Freezing().value(root)


class _Forking:
    """One walk; an object that is reached twice is copied once."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}

    def copy(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind in _ATOMS:
            return value
        if (known := self._copies.get(id(value))) is not None:
            return known
        if kind is list:
            copied: Any = [self.copy(item) for item in value]
        elif kind is set:
            copied = set(value)
        elif kind in (dict, OrderedDict):
            copied = kind((key, self.copy(item)) for key, item in value.items())
        elif kind is defaultdict:
            copied = defaultdict(value.default_factory, {key: self.copy(item) for key, item in value.items()})
        elif kind is asyncio.Event:
            copied = asyncio.Event()
            if value.is_set():
                copied.set()
        elif is_copied(kind):
            copied = kind.__new__(kind)
            self._copies[id(value)] = copied
            copied.__dict__.update(
                {
                    name: item if type(item) in _ATOMS else self.copy(item)
                    for name, item in value.__dict__.items()
                }
            )
            return copied
        else:
            return value
        self._copies[id(value)] = copied
        return copied


class _Freezing:
    """One walk; an object that is reached twice is named by its number the second time."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def value(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind in _ATOMS:
            return value
        if kind in (list, tuple):
            return tuple(map(self.value, value))
        if kind is set:
            return frozenset(value)
        if kind is np.ndarray:
            return tuple(value.tolist())
        if kind in (dict, OrderedDict, defaultdict):
            return tuple((key, self.value(item)) for key, item in value.items())
        if is_copied(kind):
            return self._object(kind, value)
        return self._whole(kind, value)

    def _whole(self, kind: Any, value: Any) -> Any:
        """Return the name of a value that is not copied."""
        if kind is asyncio.Event:
            return value.is_set()
        if kind is Accepted:
            return value.request.key, value.session
        if kind is EngineRequest:
            return value.key, type(value.transfer).__name__
        if isinstance(value, msgspec.Struct):
            return tuple(map(self.value, msgspec.structs.astuple(value))) if is_frozen(kind) else None
        return None if kind in _NAMELESS or isinstance(value, _SHARED) else value

    def _object(self, kind: type, value: Any) -> Any:
        number = self._numbers.get(id(value))
        if number is not None:
            return number
        self._numbers[id(value)] = len(self._numbers)
        return kind.__name__, *[
            item if type(item) in _ATOMS else self.value(item) for item in value.__dict__.values()
        ]


_ATOMS = frozenset({int, str, bytes, float, bool, type(None)})


@cache
def is_copied(kind: Any) -> bool:
    """Return True for our own mutable classes."""
    is_ours = f"{kind.__module__}.".startswith(_COPIED_PACKAGES) and not issubclass(kind, (*_SHARED, Enum))
    is_plain = not issubclass(kind, (msgspec.Struct, tuple)) and not is_frozen(kind)
    return is_ours and is_plain and hasattr(kind, "__init__")


@cache
def is_frozen(kind: Any) -> bool:
    """Return True for a frozen dataclass or Struct."""
    if issubclass(kind, msgspec.Struct):
        return bool(kind.__struct_config__.frozen)
    parameters: Any = getattr(kind, "__dataclass_params__", None)
    return dataclasses.is_dataclass(kind) and bool(parameters.frozen)
