"""The messages between an executor and its ranks: msgspec, never pickle.

The methods of ``RankRunner`` can be called, and their annotations give the types of arguments and results.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, get_type_hints

import msgspec
import numpy as np

from contract.decoding import json_decoder, msgpack_decoder
from contract.errors import ErrorKind, InternalError
from engine.distributed.rank_runner import RankRunner
from engine.settings import EngineSettings


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a rank process.

    doorbell, calls, answers, connector_socket, store: inherited descriptors. connector_socket: for the rank's half of a
    connector, if it gets one. large_address: of the socket for payloads that fit into no slot. store: rank 0's listening
    socket, None elsewhere. store_port: where the ranks find each other.
    """

    rank: int
    size: int
    settings: EngineSettings
    doorbell: int
    calls: int
    answers: int
    connector_socket: int
    large_address: str
    store: int | None
    store_port: int
    log_level: int


class RankCall(msgspec.Struct, frozen=True, tag="call"):
    """A call of a method with its arguments.

    from_rank: the rank that returns the result; None is every rank. is_answered: False if no rank answers; an error is then
    the answer to the next call that is answered, and those until there are not carried out.
    """

    method: str
    args: list[msgspec.Raw]
    from_rank: int | None = None
    is_answered: bool = True


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The method returned ``value`` (msgpack); None if the result is returned by another rank."""

    value: bytes | None = None


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """The method raised; ``kind``, ``message`` and ``param`` are those of a KvbatonError."""

    kind: str
    message: str
    param: str | None
    traceback: str


def cause_of(raised: Sequence[Raised]) -> Raised:
    """Return the error to be reported for all: one of a known kind, since others often follow from it."""
    return next((error for error in raised if error.kind != ErrorKind.INTERNAL), raised[0])


Answer = Returned | Raised
_Decoder = msgspec.msgpack.Decoder[Any]


def encode_plan(plan: RankPlan) -> str:
    """Encode a plan as text for a command line."""
    return msgspec.json.encode(plan, enc_hook=lambda settings: settings.model_dump(mode="json")).decode()


def decode_plan(text: str) -> RankPlan:
    """Decode what ``encode_plan`` returned."""
    plan: RankPlan = json_decoder(RankPlan, lambda _, values: EngineSettings(**values)).decode(text)
    return plan


def runner_method(method: str) -> Callable[..., Any]:
    """Return the public method of RankRunner with this name. Raises InternalError if there is none."""
    function = None if method.startswith("_") else getattr(RankRunner, method, None)
    if not callable(function):
        raise InternalError(f"a rank has no method {method!r}")
    found: Callable[..., Any] = function
    return found


def _plain(value: Any) -> Any:
    """Return an int32 array as its shape and bytes; calls hold no other kind of array."""
    if isinstance(value, np.ndarray) and value.dtype == np.int32:
        return value.shape, value.tobytes()
    raise TypeError(f"{type(value).__name__} is not plain data")


def _restored(_: type, value: Any) -> Any:
    shape, data = value
    return np.frombuffer(bytearray(data), dtype=np.int32).reshape(shape)


class MethodTypes:
    """Encodes and decodes arguments and results of the runner's methods. Keeps a decoder for each method that was called."""

    def __init__(self) -> None:
        self._arguments: dict[str, list[_Decoder]] = {}
        self._results: dict[str, _Decoder] = {}

    def encode_call(
        self, method: str, args: tuple[Any, ...], from_rank: int | None, *, is_answered: bool = True
    ) -> bytes:
        """Encode a call. Raises InternalError for an unknown method and for arguments that are not plain data."""
        runner_method(method)
        try:
            raw = [msgspec.Raw(msgspec.msgpack.encode(arg, enc_hook=_plain)) for arg in args]
        except TypeError as error:
            raise InternalError(
                f"arguments of {method!r} cannot be sent to another process: {error}"
            ) from error
        return msgspec.msgpack.encode(RankCall(method, raw, from_rank, is_answered))

    def decode_arguments(self, call: RankCall) -> list[Any]:
        """Decode the arguments by the method's annotations. Raises InternalError if their number is wrong.

        Parameters that only a keyword can give are for callers in the rank's own process.
        """
        if call.method not in self._arguments:
            method = runner_method(call.method)
            hints = get_type_hints(method)
            own = {name for name, one in signature(method).parameters.items() if one.kind is one.KEYWORD_ONLY}
            self._arguments[call.method] = [
                msgpack_decoder(hint, _restored)
                for name, hint in hints.items()
                if name not in own and name != "return"
            ]
        decoders = self._arguments[call.method]
        if len(decoders) != len(call.args):
            raise InternalError(f"{call.method!r} takes {len(decoders)} arguments, not {len(call.args)}")
        return [decoder.decode(raw) for decoder, raw in zip(decoders, call.args, strict=True)]

    def decode_value(self, method: str, value: bytes) -> Any:
        """Decode a result by the method's annotation."""
        if method not in self._results:
            self._results[method] = msgpack_decoder(get_type_hints(runner_method(method))["return"])
        return self._results[method].decode(value)
