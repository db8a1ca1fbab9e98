"""``kvbaton check PATH``: reports whether and how a model folder is served, and tests its chat template. Needs no torch."""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.cache_layout import TYPICAL_TOKENS, CacheLayout
from contract.errors import SettingError
from contract.identity import Role
from contract.sampling import MODEL_DEFAULTS
from launch.arguments import parse
from launch.client_settings import CheckSettings
from launch.devices import RankCounts, num_gpus, place_workers
from launch.memory_plan import gib
from launch.model import find_model
from serving.logs import safe_line
from text.model_card import ModelCard
from text.tokenizer import read_json
from worker.settings import visible_gpus

if TYPE_CHECKING:
    from engine.models.served import Served

_WEIGHTS = ("*.safetensors",)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
"""Files that run their author's code when they are loaded, so no command of kvbaton loads them."""


@dataclass
class Finding:
    """The result of a check. problems: reasons why the model, or chats with it, cannot be served."""

    facts: dict[str, Any] = field(default_factory=dict)
    templates: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        """Return everything as one JSON object."""
        found = {**self.facts, "chat_templates": self.templates, "problems": self.problems}
        return json.dumps(found, indent=2)

    def as_text(self) -> str:
        """Return everything as tables for people; what the folder's files contain cannot control a terminal."""
        lines = _table(self.facts)
        for name, abilities in self.templates.items():
            lines += ["", f"chat template {name!r}:", *("  " + line for line in _table(abilities))]
        lines += [*("" for _ in self.problems[:1]), *(f"problem: {one}" for one in self.problems)]
        return "\n".join(map(safe_line, lines))


def check(arguments: Sequence[str]) -> None:
    """Run ``kvbaton check``: exit with 1 if there are problems, with 2 if the path is not a model folder."""
    settings = parse(CheckSettings, "kvbaton check", arguments)
    finding = examine(find_model(settings.model), settings)
    print(finding.as_json() if settings.as_json else finding.as_text())
    if finding.problems:
        sys.exit(1)


def examine(folder: Path, settings: CheckSettings) -> Finding:
    """Read a model folder without its weights. settings: its dtypes, and the ranks that are to serve it.

    Raises SettingError if config.json is missing or broken.
    """
    config = read_json(folder / "config.json")
    files = _files(folder, _WEIGHTS)
    size = sum(file.stat().st_size for file in files)
    weights = {"weights": len(files), "weights in GiB": round(size / 2**30, 3)}
    finding = Finding({"folder": str(folder), **_config_facts(config), **weights})
    if not files and (pickles := _files(folder, _PICKLES)):
        finding.problems.append(
            f"the only weights are pickles ({pickles[0].name}), which run their author's code when they are loaded:"
            " convert them to safetensors"
        )
    elif not files:
        finding.problems.append(
            f"there are no weights ({', '.join(_WEIGHTS)}) in {folder}; only its configuration was checked"
        )
    of_card = Finding()
    with ThreadPoolExecutor(1) as beside:  # the engine may wait for a process that reads the configuration
        engine_check = beside.submit(_add_engine, finding, folder, settings)
        try:
            with closing(ModelCard.from_folder(folder)) as card:
                _add_card(of_card, card)
        except SettingError as error:
            of_card.problems.append(error.message)
        engine_check.result()
    finding.facts |= of_card.facts
    finding.templates = of_card.templates
    finding.problems += of_card.problems
    ranks = _ranks(settings)
    if ranks.num_devices > 1:
        add_devices(finding, ranks, num_gpus(visible_gpus()))
    return finding


def add_devices(finding: Finding, ranks: RankCounts, num_devices: int) -> None:
    """Add the GPUs of several ranks. num_devices: the machine's GPUs; several, but too few, are a problem."""
    finding.facts["GPUs"] = f"{ranks.num_devices} side by side (on the CPU: as many processes)"
    try:
        place_workers({Role.AGGREGATED: 1}, {}, num_devices, {Role.AGGREGATED: ranks})
    except SettingError as error:
        finding.problems.append(error.message)


def _ranks(settings: CheckSettings) -> RankCounts:
    return RankCounts(data=settings.data_parallel_size, tensor=settings.tensor_parallel_size)


def _add_engine(finding: Finding, folder: Path, settings: CheckSettings) -> None:
    """Ask the engine whether and how it serves the folder; its refusal is a problem."""
    if find_spec("safetensors") is None:
        finding.facts["served by"] = (
            "unknown: the engine is not installed here (pip install 'kvbaton[worker]')"
        )
        return
    # Imported here: a router's installation has no engine.
    from engine.models.served import examine as ask_engine

    try:
        served = ask_engine(
            folder,
            settings.dtype,
            num_ranks=settings.tensor_parallel_size,
            kv_cache_dtype=settings.kv_cache_dtype,
            data_parallel_size=settings.data_parallel_size,
            finds_states=True,
        )
    except SettingError as error:
        finding.facts["served by"] = "nothing: it is refused"
        finding.problems.append(error.message)
        return
    add_served(finding, served, _ranks(settings))


def add_served(finding: Finding, served: "Served", ranks: RankCounts) -> None:
    """Add how the engine serves a model. One that may be refused when it starts is a problem: nothing is promised then."""
    way = "the own decoder" if served.is_own else "transformers"
    if served.is_text_of_more:
        way += ", its text only (a request with an image, sound or video is refused)"
    if not served.is_tried:
        way += ", which was never tried with this family"
        finding.problems.append(
            f"{served.architecture} of this version of transformers was never tried: nothing is known against it, but"
            " whether it is served is decided at the start, by comparing its numbers"
        )
    of_ranks = {}
    if ranks.num_devices > 1:
        of_rank = served.rank_weight_bytes(ranks.tensor, ranks.data)
        of_ranks = {
            "weights on each GPU": of_rank and f"about {gib(of_rank)}",
            "weights on all GPUs": of_rank and f"about {gib(of_rank * ranks.num_devices)}",
        }
    num_bytes = served.num_weight_bytes
    in_memory = None if num_bytes is None else f"{num_bytes / 2**30:.3f} GiB in {served.dtype}"
    finding.facts |= {
        "served by": way,
        "weights in memory": in_memory,
        **of_ranks,
        "KV bytes per token": served.kv_bytes_per_token,
        **_cache_facts(served),
        "KV dtype": served.kv_dtype,
        "quantization": served.quantisation,
    }


def _cache_facts(served: "Served") -> dict[str, Any]:
    """Return the groups of layers, and the bytes that requests hold."""
    cache = served.cache
    if cache is None:
        return {}
    groups = {
        group.name: {"layers": len(group.layers), "bytes a token": group.token_bytes}
        for group in cache.groups
    }
    lengths = sorted({min(TYPICAL_TOKENS, served.max_model_len), served.max_model_len})
    held = {}
    for length in lengths:
        held[f"{length} tokens"] = {"bytes": cache.request_bytes(length)}
        if not cache.is_uniform:
            held[f"{length} tokens"]["bytes where all tokens are kept"] = length * cache.token_bytes
    return {"KV of layers": groups, "KV of a request": held, **_state_facts(served, cache)}


def _state_facts(served: "Served", cache: CacheLayout) -> dict[str, Any]:
    """Return the bytes that the states of a request hold beside its KV, and how many requests run in the default memory."""
    from engine.kv_cache.shares import HOST_LIMIT_BYTES, StateNeeds, Workload, share_with_states
    from engine.options import EngineOptions

    if (states := cache.states) is None:
        return {}
    kinds = {
        name: {
            "layers": len({part.layer for part in states.parts if part.name == name}),
            "bytes": sum(part.num_bytes for part in states.parts if part.name == name),
        }
        for name in sorted({part.name for part in states.parts})
    }
    options = EngineOptions.model_construct()
    workload = Workload(served.max_model_len, options.max_num_batched_tokens, options.max_num_seqs)
    needs = StateNeeds(states, options.block_size)
    try:
        num_requests = share_with_states(cache, HOST_LIMIT_BYTES, workload, needs)[1]
    except SettingError:
        num_requests = 0  # kv_cache_bytes must be set
    return {
        "states of a request": {**kinds, "slot": {"bytes": states.slot_bytes}},
        f"requests at once in {gib(HOST_LIMIT_BYTES)}": num_requests,
    }


def _add_card(finding: Finding, card: ModelCard) -> None:
    tokenizer = card.tokenizer
    answers = card.answer_format
    parser = answers.tool_parser
    finding.facts |= {
        "context length": card.max_model_len,
        "vocabulary": card.vocab_size,
        "special tokens": tokenizer.named_tokens,
        "end tokens": {str(token): tokenizer.written(token) for token in card.eos_token_ids},
        "generation defaults": {
            parameter.name: getattr(card.defaults, parameter.name) for parameter in MODEL_DEFAULTS
        },
        "calls are read as": parser.__name__.removesuffix("Parser").lower() if parser else "text",
        "reasoning tags": list(answers.reasoning_tags or ()),
    }
    if card.chat_template is None:
        finding.problems.append("there is no chat template: chats are rejected, completions are served")
        return
    report = card.chat_template.report
    finding.templates = {name: dict(found) for name, found in report.abilities.items()}
    finding.problems += report.problems()


def _config_facts(config: dict[str, Any]) -> dict[str, Any]:
    # Of a model that also reads images, the decoder that is served has a configuration inside.
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    quantization = config.get("quantization_config")
    return {
        "architecture": config.get("architectures"),
        "model type": config.get("model_type"),
        "dtype": next((inner[name] for name in ("dtype", "torch_dtype") if name in inner), None),
        "layers": inner.get("num_hidden_layers"),
        "hidden size": inner.get("hidden_size"),
        "quantization": quantization.get("quant_method") if isinstance(quantization, dict) else None,
    }


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return [file for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()]


def _table(values: dict[str, Any]) -> list[str]:
    width = max(map(len, values), default=0)
    return [f"{name:<{width}}  {_shown(value)}" for name, value in values.items()]


def _shown(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "-"
    if isinstance(value, dict):
        if all(isinstance(one, dict) for one in value.values()):
            return "; ".join(f"{name}: {_counted(one)}" for name, one in value.items())
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _counted(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {unit}" for unit, number in numbers.items())
