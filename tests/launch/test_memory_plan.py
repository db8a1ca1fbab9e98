"""The devices and the memory that ``up`` gives to its workers, as ``--dry-run`` prints them, and what cannot fit."""

from pathlib import Path

import pytest

from cli.up import serve, up
from contract.errors import SettingError
from launch.arguments import parse
from launch.machine_settings import UpSettings
from launch.memory_plan import plan_workers, refuse_overfull, table, unused_gpus, weight_bytes

GIB = 2**30
EIGHT = [80 * GIB] * 8
ISSUE = ("--prefill", "2", "--decode", "6", "--prefill-devices", "0,1", "--decode-devices", "2-7")


def lines(*arguments: str, num_devices: int = 8, weights: int = 16 * GIB) -> list[str]:
    """Return the lines that a machine with GPUs of 80 GiB prints."""
    settings = parse(UpSettings, "kvbaton up", arguments)
    plans = plan_workers(settings, num_devices)
    memory = EIGHT[:num_devices]
    refuse_overfull(plans, weights, memory)
    return table(plans, weights, memory)


def test_each_worker_has_a_line_with_its_gpu_and_its_memory() -> None:
    found = lines(*ISSUE)
    memory = "90% of its memory: 72.00 GiB, of which about 56.00 GiB for KV and steps"
    assert found == [
        *(f"prefill-{n}  GPU {n}  {memory}" for n in range(2)),
        *(f"decode-{n}   GPU {n + 2}  {memory}" for n in range(6)),
    ]


def test_workers_of_one_gpu_share_its_memory() -> None:
    prefill, decode = lines(num_devices=1)
    assert prefill.startswith("prefill-0  GPU 0  45% of its memory, shared by 2 workers: 36.00 GiB, of which")
    assert decode.split("GPU")[1] == prefill.split("GPU")[1]
    assert lines("--gpu-memory-utilization", "0.3", num_devices=1)[0].endswith(
        "12.00 GiB, less than the weights"
    )


def test_ranks_have_gpus_side_by_side_and_parts_of_the_weights() -> None:
    found = lines("--prefill", "1", "--decode", "3", "--tensor-parallel-size", "2")
    assert [line.split("  ")[1].strip() for line in found] == ["GPUs 0-1", "GPUs 2-3", "GPUs 4-5", "GPUs 6-7"]
    assert found[0].endswith("72.00 GiB on each, of which about 64.00 GiB for KV and steps")


def test_a_group_has_the_gpus_and_the_pools_of_all_of_its_ranks() -> None:
    group = ("--prefill", "1", "--decode", "1", "--data-parallel-size", "4")
    prefill, decode = lines(*group)
    assert [line.split("  ")[1].strip() for line in (prefill, decode)] == ["GPUs 0-3", "GPUs 4-7"]
    assert prefill.endswith("72.00 GiB on each, of which at most 68.00 GiB for KV and steps")
    pools = ("--kv-cache-bytes", str(70 * GIB))
    assert "KV pool 70.00 GiB (kv_cache_bytes) in each of 4 ranks" in lines(*group, *pools)[0]
    with pytest.raises(SettingError, match=r"GPU 0: weights and pool of prefill-0 take at least 81.00 GiB"):
        lines(*group, "--kv-cache-bytes", str(77 * GIB))
    host = lines(*group, num_devices=0)[0]
    assert host.endswith("a quarter of free host memory in each of 4 ranks, 2 workers on this machine")


@pytest.mark.parametrize(
    ("arguments", "unused"),
    [
        (ISSUE, None),
        (ISSUE[4:], "1, 3, 4, 5, 6, 7"),
        ((), "2, 3, 4, 5, 6, 7"),
        (("--prefill-devices", "0", "--decode-devices", "4"), None),
        (("--prefill", "3", "--decode", "1", "--tensor-parallel-size", "2"), None),
        (("--prefill", "2", "--decode", "1", "--tensor-parallel-size", "2"), "6, 7"),
        (("--prefill", "1", "--decode", "1", "--data-parallel-size", "3"), "6, 7"),
        (("--device", "cuda:3"), None),
        (("--device", "cpu"), None),
    ],
)
def test_gpus_without_a_worker_are_named(arguments: tuple[str, ...], unused: str | None) -> None:
    """If there are lists, only their GPUs count: the numbers of workers do not follow from them."""
    settings = parse(UpSettings, "kvbaton up", arguments)
    found = unused_gpus(settings, plan_workers(settings, 8), 8)
    words = "--prefill, --decode and --both are the numbers of workers"
    assert found == ([] if unused is None else [f"no worker on GPU {unused}: {words}"])


def test_without_gpus_the_pools_are_of_the_host() -> None:
    first, second = lines("--kv-cache-bytes", str(3 * GIB), num_devices=0)
    assert first == "prefill-0  device auto  KV pool 3.00 GiB (kv_cache_bytes), 2 workers on this machine"
    assert "at most 1 GiB" in lines("--device", "cpu")[1]
    assert second.startswith("decode-0 ")


def test_memory_that_is_unknown_is_not_shown() -> None:
    plans = plan_workers(parse(UpSettings, "kvbaton up", ISSUE), 8)
    assert table(plans, GIB, None)[0] == "prefill-0  GPU 0  90% of its memory"
    refuse_overfull(plan_workers(UpSettings(kv_cache_bytes=999 * GIB), 1), GIB, None)


def test_pools_of_a_fixed_size_that_do_not_fit_are_refused_by_name() -> None:
    """Each worker alone would start; the second one would find no memory, and only then be known to fail."""
    assert len(lines("--kv-cache-bytes", str(24 * GIB), num_devices=1)) == 2
    with pytest.raises(SettingError) as refused:
        lines("--kv-cache-bytes", str(25 * GIB), num_devices=1)
    assert refused.value.param == "kv_cache_bytes"
    assert (
        "GPU 0: weights and pool of prefill-0 and decode-0 take at least 82.00 GiB" in refused.value.message
    )
    assert "it has 80.00 GiB" in refused.value.message
    assert len(lines("--kv-cache-bytes", str(60 * GIB), num_devices=2)) == 2
    two = ("--prefill", "1", "--decode", "1", "--tensor-parallel-size", "2")
    assert len(lines(*two, "--kv-cache-bytes", str(140 * GIB), num_devices=4)) == 2
    with pytest.raises(SettingError, match=r"pool of prefill-0 take at least 81.00 GiB"):
        lines(*two, "--kv-cache-bytes", str(146 * GIB), num_devices=4)


def test_a_table_of_the_settings_file_is_part_of_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "kvbaton.toml"
    file.write_text(f'[prefill]\nkv_cache_bytes = {5 * GIB}\n[decode]\ndevice = "cuda:6"\n')
    first, second = lines("--config", str(file))
    assert "KV pool 5.00 GiB" in first
    assert "GPU 6" in second


def test_dry_run_prints_the_plan_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = tmp_path / "ready.json"
    up(["--dry-run", "--device", "cpu", "--decode", "2", "--prefill", "1", "--ready-file", str(ready)])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["prefill-0", "decode-0", "decode-1"]
    assert not ready.exists()
    up(["--dry-run", "--device", "cpu", "--autoscale", "--prefill", "0:2", "--decode", "1:3"])
    planned = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in planned] == [
        *("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
    ]
    assert "5 workers on this machine" in planned[0]
    serve(["demo", "--dry-run", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("both-0  device cpu  KV pool found at start")
    with pytest.raises(SettingError, match="prefill_devices has GPU 98, and this machine has"):
        up(["--dry-run", "--prefill-devices", "98"])


def test_the_weights_are_counted_as_they_are_stored(tmp_path: Path) -> None:
    for name, size in (("model-1.safetensors", 100), ("model-2.safetensors", 11), ("other.bin", 5)):
        (tmp_path / name).write_bytes(bytes(size))
    assert weight_bytes(tmp_path) == 111
