"""The settings of ``kvbaton up --autoscale``."""

from pathlib import Path

import pytest

from autoscaler.policy import Damping
from autoscaler.scaled_cluster import policy_of
from contract.errors import SettingError
from contract.identity import Role
from launch.arguments import parse
from launch.machine_settings import UpSettings
from launch.processes import local_processes

SCALED = ("--autoscale", "--timing", "timing.json")


def settings(*flags: str) -> UpSettings:
    return parse(UpSettings, "kvbaton up", flags)


def test_a_range_has_the_least_and_the_greatest_number() -> None:
    given = settings(*SCALED, "--prefill", "1:4", "--decode", "2:3", "--budget", "6", "--ttft-goal-ms", "500")
    policy = policy_of(given)
    assert (policy.prefill.least, policy.prefill.most) == (1, 4)
    assert (policy.decode.least, policy.decode.most) == (2, 3)
    assert (policy.budget, policy.goals.ttft, policy.goals.itl) == (6, 0.5, 0.1)


def test_a_group_is_one_worker_of_its_pool_and_occupies_the_devices_of_all_ranks(tmp_path: Path) -> None:
    file = tmp_path / "kvbaton.toml"
    file.write_text("[decode]\ndata_parallel_size = 4\n")
    ranges = ("--prefill", "1:4", "--decode", "1:3", "--tensor-parallel-size", "2", "--config", str(file))
    policy = policy_of(settings(*SCALED, *ranges, "--budget", "12"))
    assert (policy.prefill.devices, policy.prefill.data_parallel_size) == (2, 1)
    assert (policy.decode.devices, policy.decode.data_parallel_size) == (8, 4)
    with pytest.raises(SettingError, match="budget is 9, but the smallest pools need 10 devices"):
        policy_of(settings(*SCALED, *ranges, "--budget", "9"))


def test_the_pace_of_the_law_can_be_given() -> None:
    usual = settings(*SCALED)
    assert usual.scaling_interval_seconds == 5.0
    assert policy_of(usual).damping == Damping()
    assert policy_of(settings(*SCALED, "--shrink-after-seconds", "30")).damping.stabilization == 30.0


def test_a_pool_without_a_range_is_fixed() -> None:
    policy = policy_of(settings(*SCALED, "--prefill", "1", "--decode", "1:3"))
    assert (policy.prefill.least, policy.prefill.most) == (1, 1)
    assert (policy.decode.least, policy.decode.most) == (1, 3)


def test_the_largest_pools_have_a_process_for_each_worker_and_routers_get_the_goals() -> None:
    largest = settings(
        *SCALED, "--prefill", "1:2", "--decode", "1:3", "--itl-goal-ms", "40"
    ).with_largest_pools()
    specs = local_processes(largest, Path("/models/one"), Path("/private/secret"))
    assert [spec.role for spec in specs].count(Role.DECODE) == 3
    router = specs[0].command({})
    assert router[router.index("--itl-goal-ms") + 1] == "40.0"
    assert "--ttft-goal-ms" not in router
    assert not any("goal" in word for word in specs[1].command({"router": {"internal": "127.0.0.1:1"}}))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--prefill", "1:4", "--decode", "1"), "prefill is 1:4, and a range has no effect"),
        (("--timing", "timing.json"), "timing has no effect"),
        (("--shrink-after-seconds", "30"), "shrink_after_seconds has no effect"),
        (("--scaling-interval-seconds", "1"), "scaling_interval_seconds has no effect"),
        ((*SCALED, "--prefill", "4:2", "--decode", "1"), "prefill is '4:2'"),
        ((*SCALED, "--prefill", "4", "--max-prefill", "2", "--decode", "1"), "max_prefill is 2"),
        ((*SCALED, "--prefill", "1:x"), "prefill is '1:x'"),
        ((*SCALED, "--prefill", "1:3", "--max-prefill", "2"), "prefill is 1:3, and max_prefill is 2"),
        ((*SCALED, "--max-decode", "4", "--decode", "1:3"), "decode is 1:3, and max_decode is 4"),
        ((*SCALED, "--prefill", "0", "--decode", "0"), "prefill, decode and both are all 0"),
        ((*SCALED, "--prefill", "0:2", "--decode", "0"), "decode is 0"),
        (("--prefill", "0:2", "--decode", "0:2"), "prefill is 0:2, and a range has no effect"),
        ((*SCALED, "--prefill", ":3"), "prefill"),
        ((*SCALED, "--both", "1"), "aggregated workers are not scaled"),
    ],
)
def test_contradictory_settings_are_refused(flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(SettingError) as caught:
        settings(*flags)
    assert named in caught.value.message


def test_a_budget_below_the_least_pools_is_refused() -> None:
    with pytest.raises(SettingError, match="budget is 2"):
        policy_of(settings(*SCALED, "--prefill", "2:4", "--decode", "1:4", "--budget", "2"))


def test_the_same_greatest_number_may_be_given_twice() -> None:
    assert settings(*SCALED, "--prefill", "1:3", "--max-prefill", "3", "--decode", "1").max_prefill == 3


@pytest.mark.parametrize(("least", "seconds"), [("0", "540.0"), ("1", None)])
def test_a_request_waits_for_an_empty_pool_longer_than_a_start_takes(least: str, seconds: str | None) -> None:
    given = settings(*SCALED, "--prefill", f"{least}:4", "--decode", f"{least}:4")
    policy = policy_of(given)
    assert (policy.prefill.least, policy.decode.least) == (int(least), int(least))
    router, *workers = local_processes(
        given.with_largest_pools(),
        Path("/models/one"),
        Path("/private/secret"),
        router_defaults=given.router_defaults,
    )
    assert router.env is not None
    assert router.env.get("KVBATON_WORKER_WAIT_SECONDS") == seconds
    assert len(workers) == 8
    assert not any("KVBATON_WORKER_WAIT_SECONDS" in (worker.env or {}) for worker in workers)


def test_the_wait_for_an_empty_pool_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBATON_WORKER_WAIT_SECONDS", "90")
    given = settings(*SCALED, "--prefill", "0:4", "--decode", "0:4")
    model, secret = Path("/models/one"), Path("/private/secret")
    router, *_ = local_processes(
        given.with_largest_pools(), model, secret, router_defaults=given.router_defaults
    )
    assert (router.env or {})["KVBATON_WORKER_WAIT_SECONDS"] == "90"
