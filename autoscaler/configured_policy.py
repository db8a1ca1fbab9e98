"""The policy that settings describe."""

from collections.abc import Mapping

from autoscaler.policy import Damping, Goals, PoolBounds, ScalingPolicy
from contract.identity import Role
from launch.scaling_settings import ScalingSettings


def configured_policy(
    settings: ScalingSettings, least: Mapping[Role, int], devices: Mapping[Role, int]
) -> ScalingPolicy:
    """Return the policy of these settings. least: workers of each pool. devices: those that each of its workers occupies.

    Raises SettingError if the settings contradict each other.
    """
    most = {Role.PREFILL: settings.max_prefill, Role.DECODE: settings.max_decode}
    bounds = {
        role: PoolBounds(least=least[role], most=most[role] or least[role], devices=devices[role])
        for role in (Role.PREFILL, Role.DECODE)
    }
    return ScalingPolicy(
        prefill=bounds[Role.PREFILL],
        decode=bounds[Role.DECODE],
        goals=Goals(ttft=settings.ttft_goal_ms / 1e3, itl=settings.itl_goal_ms / 1e3),
        budget=settings.budget,
        damping=Damping(stabilization=settings.shrink_after_seconds),
    )
