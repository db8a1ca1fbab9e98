"""The share of the machine that each worker of ``up`` gets: its GPUs and their memory. Refuses what cannot fit."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.errors import SettingError
from launch.command_settings import from_file
from launch.devices import RankCounts, num_gpus
from launch.model import find_model
from launch.processes import rank_counts, worker_places
from launch.settings import LocalSettings
from serving.gpu_memory import gpu_memory
from worker.settings import visible_gpus

logger = logging.getLogger(__name__)

_GIB = 2**30


@dataclass(frozen=True)
class WorkerPlan:
    """One worker's share. gpus: their numbers; empty: the device is not chosen here. ranks: its processes.

    device: its setting. num_sharing: workers on its fullest GPU, or on the machine. pool_bytes: of the worker, or of each
    data-parallel rank of the group; None: what is left.
    """

    name: str
    device: str
    gpus: tuple[int, ...]
    ranks: RankCounts
    num_sharing: int
    pool_bytes: int | None
    utilization: float

    @property
    def where(self) -> str:
        """The device in words."""
        if not self.gpus:
            return f"device {self.device}"
        return f"GPU {self.gpus[0]}" if len(self.gpus) == 1 else f"GPUs {self.gpus[0]}-{self.gpus[-1]}"


def planned(settings: LocalSettings) -> list[str]:
    """Return what ``up`` would give to each worker, a line for each, and which GPUs it would leave without one.

    Raises SettingError if it cannot.
    """
    model = find_model(settings.model)
    num_devices = num_gpus(visible_gpus())
    plans = plan_workers(settings, num_devices)
    memory = gpu_memory(visible_gpus()) if any(plan.gpus for plan in plans) else None
    weights = weight_bytes(model)
    refuse_overfull(plans, _least_weights(settings, weights), memory)
    return [*table(plans, weights, memory), *unused_gpus(settings, plans, num_devices)]


def check_memory(settings: LocalSettings, model: Path) -> None:
    """Raise SettingError if pools of a fixed size do not fit into the GPUs of their workers. Log GPUs without a worker."""
    num_devices = num_gpus(visible_gpus())
    plans = plan_workers(settings, num_devices)
    for line in unused_gpus(settings, plans, num_devices):
        logger.warning("%s", line)
    if any(plan.gpus and plan.pool_bytes for plan in plans):
        refuse_overfull(plans, _least_weights(settings, weight_bytes(model)), gpu_memory(visible_gpus()))


def unused_gpus(settings: LocalSettings, plans: Sequence[WorkerPlan], num_devices: int) -> list[str]:
    """Return a line that names the GPUs without a worker, none if there are none: of the lists, or else of the machine."""
    if not any(plan.gpus for plan in plans) or settings.device not in ("auto", "cuda"):
        return []
    listed = {gpu for own in settings.given_devices.values() for gpu in own or ()}
    unused = sorted((listed or set(range(num_devices))) - {gpu for plan in plans for gpu in plan.gpus})
    if not unused:
        return []
    return [
        f"no worker on GPU {', '.join(map(str, unused))}: --prefill, --decode and --both are the numbers of workers"
    ]


def _least_weights(settings: LocalSettings, stored: int) -> int:
    """Return a lower bound of a model's weights on a device: another dtype than the stored one may halve them."""
    return stored if settings.dtype == "auto" else stored // 2


def plan_workers(settings: LocalSettings, num_devices: int) -> list[WorkerPlan]:
    """Return the plan of each worker, in the order in which they start. num_devices: the machine's GPUs."""
    plans = list[WorkerPlan]()
    for role, own in worker_places(settings, num_devices).items():
        given = from_file(settings, role, is_logged=False) if own else {}
        ranks = rank_counts(settings, role)
        pool = given.get("kv_cache_bytes", settings.kv_cache_bytes)
        for index, place in enumerate(own):
            device = str(given.get("device", place.device or settings.device))
            if device == "cuda" or (device == "auto" and num_devices):
                device = "cuda:0"
            _, _, first = device.partition(":")
            plan = WorkerPlan(
                name=f"{role.value}-{index}",
                device=device,
                gpus=tuple(range(int(first), int(first) + ranks.num_devices)) if first else (),
                ranks=ranks,
                num_sharing=place.num_sharing,
                pool_bytes=None if pool is None else int(pool),
                utilization=float(given.get("gpu_memory_utilization", settings.gpu_memory_utilization)),
            )
            plans.append(plan)
    return plans


def weight_bytes(model: Path) -> int:
    """Return the bytes of a model's weights as they are stored."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors") if file.is_file())


def refuse_overfull(plans: Sequence[WorkerPlan], weights: int, memory: Sequence[int] | None) -> None:
    """Raise SettingError if pools of a fixed size, with the weights, need more than a GPU has.

    weights: bytes of the whole model on a device, or 0 if unknown. memory: bytes of each GPU; None: nothing is known.
    """
    users = defaultdict[int, list[WorkerPlan]](list)
    for plan in plans:
        for gpu in plan.gpus:
            users[gpu].append(plan)
    for gpu, own in sorted(users.items()):
        if memory is None or gpu >= len(memory):
            continue
        needed = sum(
            # A lower bound: of a group's weights the experts alone are spread over its ranks.
            weights // plan.ranks.num_devices + (plan.pool_bytes or 0) // plan.ranks.tensor
            for plan in own
        )
        if any(plan.pool_bytes for plan in own) and needed > memory[gpu]:
            names = " and ".join(plan.name for plan in own)
            raise SettingError(
                f"kv_cache_bytes is too large for GPU {gpu}: weights and pool of {names} take at least {gib(needed)}, "
                f"and it has {gib(memory[gpu])}; lower it, leave it unset, or use other GPUs",
                param="kv_cache_bytes",
            )


def table(plans: Sequence[WorkerPlan], weights: int, memory: Sequence[int] | None) -> list[str]:
    """Return a line for each worker: its name, its device, and the memory that it may use there."""
    width = max(len(plan.name) for plan in plans)
    place = max(len(plan.where) for plan in plans)
    return [
        f"{plan.name:<{width}}  {plan.where:<{place}}  {_memory_of(plan, weights, memory)}" for plan in plans
    ]


def _memory_of(plan: WorkerPlan, weights: int, memory: Sequence[int] | None) -> str:
    others = (
        f"shared by {plan.num_sharing} workers"
        if plan.gpus
        else f"{plan.num_sharing} workers on this machine"
    )
    sharing = "" if plan.num_sharing == 1 else f", {others}"
    if plan.ranks.data > 1:
        sharing = f" in each of {plan.ranks.data} ranks{sharing}"
    if plan.pool_bytes is not None:
        return f"KV pool {gib(plan.pool_bytes)} (kv_cache_bytes){sharing}"
    if not plan.device.startswith("cuda"):
        return f"KV pool found at start: at most 1 GiB, and a quarter of free host memory{sharing}"
    share = plan.utilization / plan.num_sharing
    text = f"{share:.0%} of its memory{sharing}"
    if memory is None or not plan.gpus or plan.gpus[-1] >= len(memory):
        return text
    num_bytes = int(min(memory[gpu] for gpu in plan.gpus) * share)
    each = " on each" if plan.ranks.num_devices > 1 else ""
    rest = num_bytes - weights // plan.ranks.num_devices
    if rest <= 0:
        return f"{text}: {gib(num_bytes)}{each}, less than the weights"
    about = "about" if plan.ranks.data == 1 else "at most"  # each rank has more than its part of the weights
    return f"{text}: {gib(num_bytes)}{each}, of which {about} {gib(rest)} for KV and steps"


def gib(num_bytes: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{num_bytes / _GIB:.2f} GiB"
