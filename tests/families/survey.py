"""Tries a tiny model of every family of the installed transformers: ``python -m tests.families.survey``.

Each is loaded by the engine in this process; 16 greedy tokens of five prompts, computed in chunks of 32 in float32, are
compared with those of ``generate``. Then a prefill and a decode engine answer the same prompts, once over shm and once over
tcp. The outcomes are written into outcomes.json, and from there into docs/models.md. It takes about six minutes on two
quiet cores, or less for the families that are named.
"""

import asyncio
import json
import logging
import re
import shutil
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from contract.errors import SettingError
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import InProcessClient
from engine.models.checkpoint import read_config
from engine.models.registry import find_architecture
from engine.models.transformers_rules import read_facts
from engine.settings import EngineSettings
from tests.checkpoints import reference_greedy, write_checkpoint
from tests.engine_pair import Sides, outputs_of, running_pair, tokens_of
from tests.families.tiny_models import WRONG_WITH_A_CACHE, families, is_text_decoder, make_tiny, tiny_config

EQUAL = "equal"
REFUSED = "refused"
WRONG = "wrong"
NOT_TRIED = "not tried"
PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"
FILE = Path(__file__).with_name("outcomes.json")
NUM_TOKENS = 16
TRANSPORTS = ("shm", "tcp")
_CHUNK = 32
_MEMORY = 1 << 23
_GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
_SETTINGS: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": _CHUNK, "kv_cache_bytes": _MEMORY}
_SHARED = [(37 * i + 11) % 256 for i in range(24)]
_PROMPTS = [[7], [3, 1, 4, 1, 5], _SHARED, [*_SHARED, *range(60, 81)], [*_SHARED, *range(90, 107)]]
_START = "<!-- The following table is written by python -m tests.families.survey. -->\n"
_END = "<!-- End of the table. -->\n"


@dataclass(frozen=True)
class Outcome:
    """The result of a family. over: transports by which its tokens were equal, too. reason: of a refusal."""

    verdict: str
    over: tuple[str, ...] = ()
    is_recurrent: bool = False
    reason: str = ""

    @property
    def told(self) -> str:
        """The first column of the table."""
        if self.verdict == REFUSED:
            return f"refused: {self.reason}"
        if self.verdict == NOT_TRIED:
            return "not tried: this survey makes no small model of it"
        if self.verdict == WRONG:
            return f"**wrong** {self.reason}".strip()
        kind = "equal, with recurrent layers" if self.is_recurrent else EQUAL
        return f"{kind}: in one engine, {' and '.join(self.over)}" if self.over else f"{kind}: in one engine"


def outcome(family: str) -> Outcome:
    """Try one family."""
    folder = Path(tempfile.mkdtemp())
    try:
        try:
            config, _ = tiny_config(family)
            config.save_pretrained(folder)
            raw = read_config(folder)
            is_recurrent = find_architecture(raw) is None and read_facts(folder, raw).has_states
            model = make_tiny(family)
            write_checkpoint(folder, model, 3)
        except SettingError as error:
            return Outcome(REFUSED, reason=_reason(error.message))
        except Exception:  # noqa: BLE001 - small sizes suit not every class, and what it raises has no one type
            return Outcome(NOT_TRIED)
        try:
            found = asyncio.run(_alone(folder))
        except SettingError as error:
            return Outcome(REFUSED, reason=_reason(error.message))
        try:
            use_cache = family not in WRONG_WITH_A_CACHE
            expected = [reference_greedy(model, prompt, NUM_TOKENS, use_cache) for prompt in _PROMPTS]
        except AttributeError:  # of classes whose generate needs more than text
            return Outcome(NOT_TRIED)
        if found != expected:
            return Outcome(WRONG, is_recurrent=is_recurrent)
        try:
            answers = {each: asyncio.run(_handed_over(folder, each)) for each in TRANSPORTS}
        except SettingError:
            return Outcome(EQUAL, is_recurrent=is_recurrent)
        answers = {each: answer for each, answer in answers.items() if answer is not None}
        if wrong := [each for each, answer in answers.items() if answer != expected]:
            return Outcome(WRONG, is_recurrent=is_recurrent, reason=f"over {' and '.join(wrong)}")
        return Outcome(EQUAL, tuple(answers), is_recurrent)
    finally:
        shutil.rmtree(folder)


async def _alone(folder: Path) -> list[list[int]]:
    """Return the answers of one engine, to all prompts at once."""
    engine = await InProcessClient.start(EngineSettings(model=folder, dtype="float32", **_SETTINGS))
    try:
        asked = []
        for index, prompt in enumerate(_PROMPTS):
            request = EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=_GREEDY)
            asked.append(outputs_of(engine, request))
        return [tokens_of(outputs) for outputs in await asyncio.gather(*asked)]
    finally:
        await engine.shutdown()


async def _handed_over(folder: Path, transport: str) -> list[list[int]] | None:
    """Return the answers of a prefill and a decode engine, to all prompts at once; None if no KV has crossed."""
    async with running_pair(folder, sides=Sides(transport=transport), **_SETTINGS) as pair:
        asked = (pair.ask(str(index), prompt, _GREEDY) for index, prompt in enumerate(_PROMPTS))
        answers = [tokens_of(*legs) for legs in await asyncio.gather(*asked)]
        counters = await pair.decode.call("counters")
        await pair.until_free()
    if not (num_blocks := counters.get(f"transfer_blocks_total{{transport={transport}}}")):
        return None
    # Each prompt has at least a block of its own.
    if num_blocks < len(_PROMPTS):
        raise ValueError(f"over {transport} too few blocks have crossed: {counters}")
    return answers


def _reason(message: str) -> str:
    """Return the reason alone, without the names of the class and of an error."""
    if "the served ones are" in message:
        return "its class is not that of a decoder, or of a composite"
    reason = re.sub(r"^model: (transformers' \S+ is not served: )?(\d+ )?", "", message)
    return re.sub(r" \(.*|: .*| by \S+e[-+].*", "", reason)


def read_outcomes() -> dict[str, Outcome]:
    """Return each family's outcome, as the last run has written it."""
    types: dict[str, dict[str, Any]] = json.loads(FILE.read_text())["types"]
    return {family: Outcome(**{**fields, "over": tuple(fields["over"])}) for family, fields in types.items()}


def write_outcomes(outcomes: Mapping[str, Outcome]) -> None:
    """Write outcomes.json, and the table in docs/models.md."""
    lines = [f'  "{family}": {json.dumps(asdict(found))}' for family, found in sorted(outcomes.items())]
    types = ",\n".join(lines)
    FILE.write_text(f'{{\n "transformers": "{version("transformers")}",\n "types": {{\n{types}\n }}\n}}\n')
    before, _, rest = PAGE.read_text().partition(_START)
    PAGE.write_text(f"{before}{_START}{table_of(outcomes)}{_END}{rest.partition(_END)[2]}")


def table_of(outcomes: Mapping[str, Outcome]) -> str:
    """Return the text of docs/models.md between its two marks."""
    rows = defaultdict(list)
    for family, found in sorted(outcomes.items()):
        rows[found.told].append(family)
    order = sorted(rows, key=lambda told: (not told.startswith(EQUAL), -len(rows[told]), told))
    lines = [f"| {told} | {', '.join(rows[told])} |" for told in order]
    decoders = {family: found for family, found in outcomes.items() if is_text_decoder(family)}
    counts = [
        "| types | all | equal in one engine | over shm and tcp, too | with states | refused | not tried | wrong |",
        "| -- | -- | -- | -- | -- | -- | -- | -- |",
        f"| of transformers | {_counts(outcomes)} |",
        f"| decoders of text alone | {_counts(decoders)} |",
    ]
    return "\n".join([*counts, "", "| outcome | `model_type` |", "| -- | -- |", *lines, ""])


def _counts(outcomes: Mapping[str, Outcome]) -> str:
    found = list(outcomes.values())
    equal = [each for each in found if each.verdict == EQUAL]
    over = [each for each in equal if each.over == TRANSPORTS]
    recurrent = [each for each in equal if each.is_recurrent]
    others = [[each for each in found if each.verdict == kind] for kind in (REFUSED, NOT_TRIED, WRONG)]
    return " | ".join(str(len(each)) for each in (found, equal, over, recurrent, *others))


def _quiet() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    found = read_outcomes() if sys.argv[1:] else {}
    tried = sys.argv[1:] or families()
    with ProcessPoolExecutor(initializer=_quiet) as pool:
        for family, result in zip(tried, pool.map(outcome, tried), strict=True):
            found[family] = result
            sys.stderr.write(f"{family}: {result.told}\n")
    write_outcomes(found)
