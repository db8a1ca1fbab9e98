"""The calls from an executor to its ranks: the runner whose methods they name, and their messages (msgspec, never pickle).

The annotations of ``RankRunner`` give the types of arguments and results.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from multiprocessing.connection import Connection
from typing import Any, get_type_hints

import msgspec
import numpy as np

from contract.decoding import msgpack_decoder
from contract.errors import ErrorKind, InternalError
from engine.compute.runner import ModelRunner
from engine.distributed.group import RankGroup
from engine.kv_tiers.orders import OpenedTier, TierOrder
from engine.kv_tiers.rank_tiers import RankTiers, open_tiers
from engine.kv_tiers.storage import RankPlace
from engine.outputs import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from engine.settings import EngineSettings

_Decoder = msgspec.msgpack.Decoder[Any]


class RankRunner(ModelRunner):
    """A ModelRunner whose steps may be begun ahead by calls. All ranks get the same calls in the same order.

    tier_reports: the pipe over which its KV tiers report, if it may have any; owned.
    """

    def __init__(
        self, settings: EngineSettings, group: RankGroup, tier_reports: Connection | None = None
    ) -> None:
        super().__init__(settings, group=group)
        self._tier_reports = tier_reports
        self._tiers: RankTiers | None = None
        # Steps that are not finished, and what waits for each.
        self._begun: deque[tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]] = deque()

    def echo(self, payload: bytes) -> bytes:
        """Return the payload, as a sign that this rank can be reached."""
        return payload

    def get_runs_ahead(self) -> bool:
        """Return ``runs_ahead``."""
        return self.runs_ahead

    def open_kv_tiers(self) -> list[OpenedTier]:
        """Open this rank's part of the KV tiers; after the KV start-up. Raises SettingError, see ``open_tiers``."""
        if self._tier_reports is None:
            raise InternalError("the KV tiers of this rank have nowhere to report to")
        place = RankPlace(self._group.rank, self._group.size)
        groups = self.regions.config.cache.groups
        opening = partial(open_tiers, self._settings, self.memory, self.model_info.fingerprint, groups, place)
        self._tiers = RankTiers(opening, self._tier_reports)
        return self._tiers.opened()

    def order_kv_tiers(self, orders: list[TierOrder]) -> None:
        """Begin what the KV tiers are ordered to do."""
        if self._tiers is not None:
            self._tiers.carry_out(orders)

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See ModelRunner; begins the step's orders to the KV tiers before it, as copies and steps run beside each other."""
        self.order_kv_tiers(scheduled.kv_tier_orders)
        return super().begin(scheduled)

    def shutdown(self) -> None:
        """See ModelRunner; closes the KV tiers before the pool that they copy from and to."""
        if self._tiers is not None:
            self._tiers.close()
        if self._tier_reports is not None:
            self._tier_reports.close()
        super().shutdown()

    def begin_step(self, scheduled: SchedulerOutput, masks: GrammarOutput | None) -> None:
        """Begin a step; see ``begin``. masks: those of the step before, if it was begun without them."""
        if masks is not None:
            self._begun[-1][0].add_grammar_output(masks)
        self._begun.append((scheduled, self.begin(scheduled)))

    def finish_step(self, masks: GrammarOutput | None) -> ModelRunnerOutput:
        """Wait for the oldest step that is not finished. masks: its own, if it was begun without them."""
        scheduled, finish = self._begun.popleft()
        if masks is not None:
            scheduled.add_grammar_output(masks)
        return finish()


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a rank process.

    doorbell, calls, answers, tier_reports, connector_socket, store: inherited descriptors. tier_reports: for reports of the
    rank's KV tiers. connector_socket: for the rank's half of a connector, if it gets one. large_address: of the socket for
    payloads that fit into no slot. store: rank 0's listening socket, None elsewhere. store_port: where the ranks find each
    other.
    """

    rank: int
    size: int
    settings: EngineSettings
    doorbell: int
    calls: int
    answers: int
    tier_reports: int
    connector_socket: int
    large_address: str
    store: int | None
    store_port: int
    log_level: int


class RankCall(msgspec.Struct, frozen=True, tag="call"):
    """A call of a method with its arguments, in the order of its parameters.

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


def runner_method(method: str) -> Callable[..., Any]:
    """Return the public method of RankRunner with this name. Raises InternalError if there is none."""
    function = None if method.startswith("_") else getattr(RankRunner, method, None)
    if not callable(function):
        raise InternalError(f"a rank has no method {method!r}")
    found: Callable[..., Any] = function
    return found


def arguments_of(function: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> list[Any]:
    """Return all arguments of a rank's method in the order of its parameters: ``args``, those ``given`` by name, defaults.

    Parameters that only a keyword can give are for callers in the rank's own process. Raises InternalError for arguments
    that do not fit.
    """
    expected = signature(function)
    shared = [one for one in expected.parameters.values() if one.kind is not one.KEYWORD_ONLY]
    try:
        bound = expected.replace(parameters=shared).bind(*args, **given)
    except TypeError as error:
        raise InternalError(f"{function.__name__!r} cannot be called: {error}") from error
    bound.apply_defaults()
    return list(bound.args)


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
        self,
        method: str,
        args: tuple[Any, ...],
        from_rank: int | None,
        *,
        is_answered: bool = True,
        given: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Encode a call. given: arguments by name.

        Raises InternalError for an unknown method, and for arguments that do not fit it or are not plain data.
        """
        _, *whole = arguments_of(runner_method(method), (None, *args), given or {})
        try:
            raw = [msgspec.Raw(msgspec.msgpack.encode(arg, enc_hook=_plain)) for arg in whole]
        except TypeError as error:
            raise InternalError(
                f"arguments of {method!r} cannot be sent to another process: {error}"
            ) from error
        return msgspec.msgpack.encode(RankCall(method, raw, from_rank, is_answered))

    def decode_arguments(self, call: RankCall) -> list[Any]:
        """Decode the arguments by the method's annotations."""
        if call.method not in self._arguments:
            method = runner_method(call.method)
            hints = get_type_hints(method)
            # Parameters that only a keyword can give are for callers in the rank's own process.
            own = {name for name, one in signature(method).parameters.items() if one.kind is one.KEYWORD_ONLY}
            self._arguments[call.method] = [
                msgpack_decoder(hint, _restored)
                for name, hint in hints.items()
                if name not in own and name != "return"
            ]
        decoders = self._arguments[call.method]
        return [decoder.decode(raw) for decoder, raw in zip(decoders, call.args, strict=True)]

    def decode_value(self, method: str, value: bytes) -> Any:
        """Decode a result by the method's annotation."""
        if method not in self._results:
            self._results[method] = msgpack_decoder(get_type_hints(runner_method(method))["return"])
        return self._results[method].decode(value)
