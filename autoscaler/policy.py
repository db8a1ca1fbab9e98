"""The decisions of an operator about the pools, and the constants of the law."""

from dataclasses import dataclass, field

from contract.errors import SettingError
from contract.identity import Role


@dataclass(frozen=True, kw_only=True)
class PoolBounds:
    """The least and the greatest number of workers of a pool. devices: those that each of its workers occupies.

    data_parallel_size: ranks of each of them. A data-parallel group is one worker here, as it starts, drains and changes its
    role as a whole, while routers have a worker for each of its ranks.
    """

    least: int = 1
    most: int = 1
    devices: int = 1
    data_parallel_size: int = 1

    def clamp(self, number: int) -> int:
        """Return the nearest number within the bounds."""
        return max(self.least, min(number, self.most))


@dataclass(frozen=True, kw_only=True)
class Goals:
    """The latencies, in seconds, that nine of ten requests are to have."""

    ttft: float
    itl: float


@dataclass(frozen=True, kw_only=True)
class Damping:
    """The times, in seconds, and thresholds that keep the law from changing its mind.

    up_share, down_share: shares of a goal above which a pool grows and below which it may shrink. settling: after a change
    of its ready workers a pool does not grow for its latencies, which are those of before, for this long. stabilization: a
    pool shrinks only to a number that sufficed for this long. removal_interval: between two workers that a pool loses.
    flip_gain: the part by which a flip must lower the greatest pressure. opposite_flip_interval: between flips in opposite
    directions. forgotten_after: a worker that starts for this many median start times is given up, or for as many times the
    one of the timing file if that is longer: a start takes longer on a busy machine. first_start: it is not given up before
    this time while no ordered start has ended: the first ones run under the load that has ordered them.
    """

    up_share: float = 0.55
    down_share: float = 0.40
    settling: float = 45.0
    stabilization: float = 180.0
    removal_interval: float = 60.0
    flip_gain: float = 0.15
    opposite_flip_interval: float = 30.0
    forgotten_after: float = 3.0
    first_start: float = 600.0


@dataclass(frozen=True, kw_only=True)
class ScalingPolicy:
    """The bounds of both pools, the goals, and the devices that both may occupy together. budget: None: no limit.

    Raises SettingError if these contradict each other.
    """

    prefill: PoolBounds
    decode: PoolBounds
    goals: Goals
    budget: int | None = None
    damping: Damping = field(default_factory=Damping)

    def __post_init__(self) -> None:
        for role in (Role.PREFILL, Role.DECODE):
            bounds = self.bounds(role)
            if not 0 <= bounds.least <= bounds.most or bounds.most < 1:
                raise SettingError(
                    f"{role.value} is {bounds.least}:{bounds.most}; it must be LEAST:MOST, with LEAST from 0 to MOST and"
                    " MOST from 1 on"
                )
        least = self.num_devices({Role.PREFILL: self.prefill.least, Role.DECODE: self.decode.least})
        if self.budget is not None and self.budget < least:
            raise SettingError(f"budget is {self.budget}, but the smallest pools need {least} devices")

    def bounds(self, role: Role) -> PoolBounds:
        """Return the bounds of a pool."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def has_equal_workers(self) -> bool:
        """True if a worker of one pool can take the place of one of the other."""
        shapes = {(pool.devices, pool.data_parallel_size) for pool in (self.prefill, self.decode)}
        return len(shapes) == 1

    def num_devices(self, workers: dict[Role, int]) -> int:
        """Return the devices that this many workers of each pool occupy."""
        return sum(number * self.bounds(role).devices for role, number in workers.items())
