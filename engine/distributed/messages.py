"""What an executor and its ranks say to each other: msgspec, never pickle.

Which types a method takes and gives is what its annotations in ``ModelRunner`` say; nothing else can be called.
"""

from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec
import numpy as np

from contract.errors import InternalError
from engine.compute.runner import ModelRunner
from engine.settings import EngineSettings


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank process is started with. ``doorbell``, ``calls``, ``answers``, ``line``: inherited descriptors.

    line: for the rank's half of a connector, if it gets one. large_address: where payloads go that fit into no slot.
    store: rank 0's listening socket, None elsewhere. store_port: where the ranks find each other.
    """

    rank: int
    size: int
    settings: EngineSettings
    doorbell: int
    calls: int
    answers: int
    line: int
    large_address: str
    store: int | None
    store_port: int
    log_level: int


class RankCall(msgspec.Struct, frozen=True, tag="call"):
    """Call this method with these arguments. from_rank: who returns the result; None is every rank."""

    method: str
    args: list[msgspec.Raw]
    from_rank: int | None = None


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The method returned ``value`` (msgpack); None where nobody wants it from this rank."""

    value: bytes | None = None


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """The method raised; ``kind``, ``message`` and ``param`` are those of a KvbatonError."""

    kind: str
    message: str
    param: str | None
    traceback: str


Answer = Returned | Raised
_Decoder = msgspec.msgpack.Decoder[Any]


def encode_plan(plan: RankPlan) -> str:
    """As text for a command line."""
    return msgspec.json.encode(plan, enc_hook=lambda settings: settings.model_dump(mode="json")).decode()


def decode_plan(text: str) -> RankPlan:
    """The opposite of ``encode_plan``."""
    return msgspec.json.decode(text, type=RankPlan, dec_hook=lambda _, values: EngineSettings(**values))


def runner_method(method: str) -> Callable[..., Any]:
    """The public method of ModelRunner with this name. Raises InternalError where there is none."""
    function = None if method.startswith("_") else getattr(ModelRunner, method, None)
    if not callable(function):
        raise InternalError(f"a rank has no method {method!r}")
    found: Callable[..., Any] = function
    return found


def _plain(value: Any) -> Any:
    """An int32 array as its shape and bytes: the one kind of arrays that calls hold."""
    if isinstance(value, np.ndarray) and value.dtype == np.int32:
        return value.shape, value.tobytes()
    raise TypeError(f"{type(value).__name__} is no plain data")


def _restored(_: type, value: Any) -> Any:
    shape, data = value
    return np.frombuffer(bytearray(data), dtype=np.int32).reshape(shape)


class MethodTypes:
    """Arguments and results of the runner's methods as bytes. Keeps a decoder for each method that was called."""

    def __init__(self) -> None:
        self._arguments: dict[str, list[_Decoder]] = {}
        self._results: dict[str, _Decoder] = {}

    def encode_call(self, method: str, args: tuple[Any, ...], from_rank: int | None) -> bytes:
        """A call as bytes. Raises InternalError for an unknown method and for arguments that are not plain data."""
        runner_method(method)
        try:
            raw = [msgspec.Raw(msgspec.msgpack.encode(arg, enc_hook=_plain)) for arg in args]
        except TypeError as error:
            raise InternalError(
                f"arguments of {method!r} cannot travel to another process: {error}"
            ) from error
        return msgspec.msgpack.encode(RankCall(method, raw, from_rank))

    def decode_arguments(self, call: RankCall) -> list[Any]:
        """The arguments as the method's annotations say. Raises InternalError where their number is another one."""
        if call.method not in self._arguments:
            hints = get_type_hints(runner_method(call.method))
            self._arguments[call.method] = [
                msgspec.msgpack.Decoder(hint, dec_hook=_restored)
                for name, hint in hints.items()
                if name != "return"
            ]
        decoders = self._arguments[call.method]
        if len(decoders) != len(call.args):
            raise InternalError(f"{call.method!r} takes {len(decoders)} arguments, not {len(call.args)}")
        return [decoder.decode(raw) for decoder, raw in zip(decoders, call.args, strict=True)]

    def decode_value(self, method: str, value: bytes) -> Any:
        """A result as the method's annotation says."""
        if method not in self._results:
            self._results[method] = msgspec.msgpack.Decoder(get_type_hints(runner_method(method))["return"])
        return self._results[method].decode(value)
