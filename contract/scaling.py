"""The decisions of an autoscaler, as it reports them to routers."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

AUTOSCALER = "autoscaler"
"""The name under which an autoscaler drains workers: a later one goes on with that, and not with an operator's drain."""


class ScalingReason(StrEnum):
    """The reason for which a pool changes or stays. The values are labels of metrics."""

    STEADY = "steady"
    FORECAST = "forecast"
    LATENCY = "latency"
    IDLE = "idle"
    WAKE = "wake"
    BOUNDS = "bounds"
    BUDGET = "budget"
    FLIP = "flip"
    STABILIZING = "stabilizing"
    IN_FLIGHT = "in_flight"
    FORGOTTEN = "forgotten"
    NO_SIGNALS = "no_signals"


HOLDS = (
    ScalingReason.BOUNDS,
    ScalingReason.BUDGET,
    ScalingReason.FLIP,
    ScalingReason.STABILIZING,
    ScalingReason.IN_FLIGHT,
    ScalingReason.NO_SIGNALS,
)
"""The reasons for which a pool does not have the number that it needs yet."""


class Direction(StrEnum):
    """The direction in which a decision changes the number of workers of a pool."""

    UP = "up"
    DOWN = "down"
    NONE = "none"


class PoolScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decision for one pool.

    desired: workers that it is to have. held: further workers that it needs and does not get now; negative: those that it
    could do without and keeps. held_by: one of ``HOLDS``; None if nothing is held. correction: measured times as a multiple
    of those of the timing model; is_correction_bounded: it is at its bound, so the model must be measured again. least: the
    least number of workers; a pool of 0 waits for the first request.
    """

    desired: Annotated[int, Meta(ge=0)]
    direction: Direction
    reason: ScalingReason
    held: int = 0
    held_by: ScalingReason | None = None
    correction: Annotated[float, Meta(gt=0.0)] = 1.0
    is_correction_bounded: bool = False
    least: Annotated[int, Meta(ge=0)] = 1


class ScalingReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One decision of an autoscaler. num_restarts: how often it has failed and begun again."""

    prefill: PoolScaling
    decode: PoolScaling
    num_restarts: Annotated[int, Meta(ge=0)] = 0


class ScalingLease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The right to scale a service, which one autoscaler has at a time.

    holder: its name. seconds: for which it asks; 0 gives the lease back. In a router's answer: who has it, and how much of
    the time is left.
    """

    holder: Annotated[str, Meta(min_length=1, max_length=200)]
    seconds: Annotated[float, Meta(ge=0.0, le=600.0)]
