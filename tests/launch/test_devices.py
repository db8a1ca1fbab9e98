"""The GPUs of the workers of one machine: lists, an even spread, groups for ranks, and shares of memory."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from contract.errors import SettingError
from contract.identity import Role
from launch.arguments import parse
from launch.devices import DevicePlace, RankCounts, num_gpus, parse_devices, place_workers
from launch.group import group_specs
from launch.machine_settings import UpSettings
from launch.processes import local_processes
from launch.service_settings import DecodeCommand
from serving.gpu_memory import GpuMemory, gpu_memory, reader_of
from tests.launch.test_processes import ROUTER_FACTS, flags

P, D, B = Role.PREFILL, Role.DECODE, Role.AGGREGATED
TWO = RankCounts(tensor=2)

GIB = 2**30


class PlayedDriver:
    """NVIDIA's library for GPUs of so many GiB; a list: one that is divided (None: a place without an instance).

    gpus: None without a driver. num_open: starts of the library that were not ended.
    """

    class NVMLError(Exception):
        """Any failure."""

    def __init__(self, gpus: Sequence[int | Sequence[int | None]] | None) -> None:
        self._gpus = gpus
        self.num_open = 0

    def replace(self, gpus: Sequence[int | Sequence[int | None]] | None) -> None:
        """Change what is there."""
        self._gpus = gpus

    def nvmlInit(self) -> None:  # noqa: N802 - the library's names
        if self._gpus is None:
            raise self.NVMLError("driver not loaded")
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        assert self._gpus is not None and self.num_open
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> tuple[int, ...]:  # noqa: N802
        return (number,)

    def nvmlDeviceGetMigMode(self, handle: tuple[int, ...]) -> tuple[int, int]:  # noqa: N802
        size = self._size(handle)
        if size == 24:
            raise self.NVMLError("not supported")
        return (0, 0) if isinstance(size, int) else (1, 1)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: tuple[int, ...]) -> int:  # noqa: N802
        size = self._size(handle)
        assert isinstance(size, Sequence)
        return len(size)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: tuple[int, ...], number: int) -> tuple[int, ...]:  # noqa: N802
        if self._size((*handle, number)) is None:
            raise self.NVMLError("not found")
        return (*handle, number)

    def nvmlDeviceGetUUID(self, handle: tuple[int, ...]) -> str:  # noqa: N802
        return ("GPU-" if len(handle) == 1 else "MIG-") + "-".join(map(str, handle))

    def nvmlDeviceGetMemoryInfo(self, handle: tuple[int, ...]) -> SimpleNamespace:  # noqa: N802
        size = self._size(handle)
        assert isinstance(size, int)
        return SimpleNamespace(total=size * GIB, used=size * GIB // 4)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> tuple[int, ...]:  # noqa: N802
        handle = tuple(int(number) for number in uuid.split("-")[1:])
        if not isinstance(self._size(handle), int):
            raise self.NVMLError("not found")
        return handle

    def _size(self, handle: tuple[int, ...]) -> int | Sequence[int | None] | None:
        assert self._gpus is not None and self.num_open
        found = self._gpus[handle[0]]
        return found[handle[1]] if len(handle) > 1 and isinstance(found, Sequence) else found


def placed(settings: UpSettings, num_devices: int) -> dict[str, tuple[str | None, str]]:
    """The device and the number of workers that share its memory, by worker."""
    found = local_processes(settings, Path("/models/one"), Path("/private/secret"), None, num_devices)
    own = {spec.name: flags(spec.command({"router": ROUTER_FACTS})) for spec in found[1:]}
    return {name: (each.get("--device"), each["--workers-on-host"]) for name, each in own.items()}


def test_without_several_gpus_nothing_is_placed() -> None:
    for num_devices in (0, 1):
        assert placed(UpSettings(), num_devices) == {"prefill-0": (None, "2"), "decode-0": (None, "2")}
    assert placed(UpSettings(device="cpu"), 8) == {"prefill-0": ("cpu", "2"), "decode-0": ("cpu", "2")}
    assert placed(UpSettings(device="cuda:3"), 8)["decode-0"] == ("cuda:3", "2")


def test_workers_are_spread_over_all_gpus() -> None:
    """A worker has a GPU of its own where there are enough, else the GPU's memory is divided by its workers."""
    assert placed(UpSettings(), 8) == {"prefill-0": ("cuda:0", "1"), "decode-0": ("cuda:1", "1")}
    three = placed(UpSettings(prefill=1, decode=2), 2)
    assert three == {"prefill-0": ("cuda:0", "2"), "decode-0": ("cuda:1", "1"), "decode-1": ("cuda:0", "2")}


def test_lists_choose_the_gpus_of_a_role() -> None:
    settings = UpSettings(prefill=2, decode=3, prefill_devices="0,1", decode_devices="2-3")
    assert placed(settings, 4) == {
        "prefill-0": ("cuda:0", "1"),
        "prefill-1": ("cuda:1", "1"),
        "decode-0": ("cuda:2", "2"),
        "decode-1": ("cuda:3", "1"),
        "decode-2": ("cuda:2", "2"),
    }
    assert placed(UpSettings(both=1, both_devices="0"), 1) == {"both-0": ("cuda:0", "1")}


def test_ranks_have_gpus_side_by_side() -> None:
    places = place_workers({P: 1, D: 2}, {P: [0, 1], D: None}, 6, {P: TWO, D: TWO})
    assert places == {
        P: [DevicePlace("cuda:0", 2)],
        D: [DevicePlace("cuda:0", 2), DevicePlace("cuda:2", 1)],
    }
    two = dict.fromkeys((P, D, B), TWO)
    assert place_workers({P: 0, D: 0, B: 2}, {B: [7, 1, 2, 4, 5]}, 8, two)[B] == [
        DevicePlace("cuda:1", 1),
        DevicePlace("cuda:4", 1),
    ]
    with pytest.raises(
        SettingError, match="decode_devices: each worker needs 2 GPUs side by side, and it lists 2"
    ):
        place_workers({P: 0, D: 1}, {D: [0, 2]}, 4, two)
    with pytest.raises(SettingError, match="each worker needs 4 GPUs side by side, and this machine has 3"):
        place_workers({B: 1}, {}, 3, {B: RankCounts(tensor=4)})


def test_a_group_has_one_place_with_the_gpus_of_all_of_its_ranks() -> None:
    group = RankCounts(data=2, tensor=2)
    places = place_workers({P: 1, D: 2}, {}, 8, {P: RankCounts(), D: group})
    assert [place.device for place in places[P] + places[D]] == ["cuda:0", "cuda:4", "cuda:0"]
    message = "data_parallel_size: each group of 2 ranks needs 4 GPUs side by side, and this machine has 3"
    with pytest.raises(SettingError, match=message):
        place_workers({B: 1}, {}, 3, {B: group})
    with pytest.raises(SettingError, match="both_devices: each group of 2 ranks needs 4 GPUs side by side"):
        place_workers({B: 1}, {B: [0, 1, 2]}, 8, {B: group})
    settings = parse(
        UpSettings, "kvbaton up", ["--decode", "2", "--prefill", "1", "--data-parallel-size", "2"]
    )
    assert {name: device for name, (device, _) in placed(settings, 8).items()} == {
        "prefill-0": "cuda:0",
        "decode-0": "cuda:2",
        "decode-1": "cuda:4",
    }


@pytest.mark.parametrize(
    ("device", "devices", "num_sharing"),
    [("cuda:2", ["cuda:2", "cuda:4"], 3), ("cuda", ["cuda:0", "cuda:2"], 3), ("cpu", ["cpu"] * 2, 6)],
)
def test_the_ranks_of_a_group_share_memory_only_without_gpus_of_their_own(
    device: str, devices: list[str], num_sharing: int
) -> None:
    words = ("--data-parallel-size", "2", "--tensor-parallel-size", "2", "--workers-on-host", "3")
    settings = parse(DecodeCommand, "kvbaton decode", [*words, "--worker-id", "decode-0", "--device", device])
    found = {spec.name: flags(spec.command({})) for spec in group_specs(D, settings)}
    assert [found[f"decode-0-{rank}"]["--device"] for rank in range(2)] == devices
    assert {each["--workers-on-host"] for each in found.values()} == {str(num_sharing)}


def test_roles_may_differ_in_their_ranks(tmp_path: Path) -> None:
    """A worker of several ranks takes GPUs that no other worker has, as long as there are enough."""
    places = place_workers({P: 2, D: 2}, {}, 8, {P: RankCounts(), D: TWO})
    assert [place.device for place in places[P] + places[D]] == ["cuda:0", "cuda:1", "cuda:2", "cuda:4"]
    assert all(place.num_sharing == 1 for place in places[P] + places[D])
    odd = place_workers({P: 1, D: 3}, {}, 6, {P: RankCounts(), D: TWO})
    assert [(place.device, place.num_sharing) for place in odd[D]] == [
        ("cuda:2", 1),
        ("cuda:4", 1),
        ("cuda:0", 2),
    ]
    file = tmp_path / "kvbaton.toml"
    file.write_text("[decode]\ntensor_parallel_size = 4\n")
    settings = parse(UpSettings, "kvbaton up", ["--config", str(file), "--prefill", "2", "--decode", "1"])
    assert {name: device for name, (device, _) in placed(settings, 8).items()} == {
        "prefill-0": "cuda:0",
        "prefill-1": "cuda:1",
        "decode-0": "cuda:4",
    }


def test_wrong_lists_are_rejected_by_name() -> None:
    with pytest.raises(SettingError, match="decode_devices has GPU 4, and this machine has 4 GPUs"):
        placed(UpSettings(decode_devices="0-4"), 4)
    with pytest.raises(SettingError, match="device is cpu, and GPUs of workers are listed"):
        placed(UpSettings(device="cpu", prefill_devices="0"), 4)
    for text, words in (
        ("0,x", "list of GPU numbers"),
        ("3-1", "ends before"),
        ("1,0-2", "names a GPU twice"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_devices(text)
        with pytest.raises(SettingError, match=f"prefill_devices is '{text}': .*{words}"):
            parse(UpSettings, "kvbaton up", ["--prefill-devices", text])
    assert parse_devices("0, 2-4,9") == [0, 2, 3, 4, 9]


def test_a_worker_takes_one_gpu() -> None:
    given = ["--router", "127.0.0.1:7", "--device", "cuda:5"]
    assert parse(DecodeCommand, "kvbaton decode", given).device == "cuda:5"


def test_gpus_are_counted_by_the_driver() -> None:
    """Without torch. CUDA ignores what is behind a number without a GPU; a build for the CPU sees none."""
    driver = PlayedDriver([80, 80, 24])
    seen = {
        visible: num_gpus(visible, driver, has_cpu_build=False)
        for visible in (None, "", "-1", "2", "1,0", "0,7,1", "GPU-1,0", "GPU-", "0,-1,1")
    }
    assert seen == {
        None: 3, "": 0, "-1": 0, "2": 1, "1,0": 2, "0,7,1": 1, "GPU-1,0": 2, "GPU-": 0, "0,-1,1": 1,
    }  # fmt: skip
    assert num_gpus(None, driver, has_cpu_build=True) == 0
    assert driver.num_open == 0


@pytest.mark.parametrize(
    ("files", "visible", "number"),
    [
        (["nvidia0", "nvidia1", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia-caps"], None, 3),
        (["nvidia3"], None, 1),
        (["nvidia0", "nvidia1"], "1", 1),
        (["nvidia0", "nvidia1"], "1,0", 2),
        (["nvidia0", "nvidia1"], "0,7,1", 1),
        (["nvidia0", "nvidia1"], "", 0),
        (["nvidia0", "nvidia1"], "-1", 0),
        (["nvidia0", "nvidia1"], "GPU-aa,GPU-bb,GPU-cc", 2),
        (["nvidia0", "nvidia1"], "MIG-aa,MIG-bb", 1),
        (["dxg"], None, 1),
        (["nvidiactl"], None, 0),
        ([], "0", 0),
    ],
)
def test_without_the_drivers_library_its_files_are_counted(
    files: list[str], visible: str | None, number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its library is missing in some containers: their workers used the CPU, without a word."""
    for name in files:
        (tmp_path / name).touch()
    found = num_gpus(visible, PlayedDriver(None), has_cpu_build=False, device_files=tmp_path)
    assert found == number
    assert (f"show {number} GPUs, of unknown memory" in caplog.text) is (number > 0)
    assert num_gpus(visible, PlayedDriver(None), has_cpu_build=True, device_files=tmp_path) == 0
    assert num_gpus(None, PlayedDriver([80]), has_cpu_build=False, device_files=tmp_path) == 1


@pytest.mark.parametrize(
    ("visible", "sizes"),
    [
        (None, [80]),
        ("0", []),
        ("1", [80]),
        ("MIG-0-2", [20]),
        ("MIG-0-0,MIG-0-2", [10]),
        ("1,MIG-0-0", [10]),
        ("MIG-9", []),
    ],
)
def test_instances_of_a_divided_gpu_have_their_own_memory(visible: str | None, sizes: list[int]) -> None:
    """MIG: the first of two GPUs is divided, one of three places has no instance. A process sees one instance at most."""
    driver = PlayedDriver([[10, None, 20], 80])
    assert gpu_memory(visible, driver) == [size * GIB for size in sizes]
    assert num_gpus(visible, driver, has_cpu_build=False) == len(sizes)
    assert gpu_memory(None, PlayedDriver([[10, 20]])) == [10 * GIB]


@pytest.mark.parametrize(
    ("device", "num_gpus", "visible", "expected"),
    [
        ("cuda:0", 1, None, 80),
        ("cuda:1", 2, None, 64),
        ("cuda:1", 1, "2,0", 80),
        ("cuda:0", 2, "GPU-2,0", 104),
        ("cpu", 1, None, None),
        ("cuda:7", 1, None, None),
    ],
)
def test_the_used_memory_of_a_workers_gpus_is_read(
    device: str, num_gpus: int, visible: str | None, expected: int | None
) -> None:
    """The ranks have neighbouring GPUs, of those that CUDA shows. A quarter of each is used."""
    driver = PlayedDriver([80, 40, 24])
    found = reader_of(device, num_gpus, visible, driver).read()
    wanted = None if expected is None else GpuMemory(expected * GIB // 4, expected * GIB)
    assert found == wanted
    assert driver.num_open == 0


def test_the_used_memory_of_an_instance_is_its_own() -> None:
    reader = reader_of("cuda:0", 1, "MIG-0-2", PlayedDriver([[10, None, 20], 80]))
    assert reader.read() == GpuMemory(5 * GIB, 20 * GIB)


async def test_memory_that_cannot_be_read_is_unknown_and_read_again_later() -> None:
    """A GPU that is gone takes neither the worker nor the last figure as if it were new."""
    driver = PlayedDriver([80])
    reader = reader_of("cuda:0", 1, None, driver)
    reading = asyncio.create_task(reader.keep_read(0.001))
    try:
        async with asyncio.timeout(20):
            for gpus, is_known in (([80], True), (None, False), ([[10]], False), ([80], True)):
                driver.replace(gpus)
                while (reader.memory is not None) != is_known:
                    await asyncio.sleep(0.001)
    finally:
        reading.cancel()
    await reader_of("cpu", 1, None, driver).keep_read()
