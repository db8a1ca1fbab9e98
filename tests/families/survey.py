"""Tries a tiny model of every family of the installed transformers: ``python -m tests.families.survey``.

Each is loaded by the engine in this process; 16 greedy tokens of five prompts, computed in chunks of 32 in float32, are
compared with those of ``generate``. Then a prefill and a decode engine answer the same prompts, once over shm and once over
tcp. The outcomes are written into docs/models.md. It takes about six minutes, or less for the families that are named.
"""

import asyncio
import logging
import re
import shutil
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Mapping
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
from tests.families.tiny_models import WRONG_WITH_A_CACHE, families, make_tiny, tiny_config

EQUAL = "every token equals `generate`'s, also handed over by shm and by tcp"
EQUAL_ALONE = "every token equals `generate`'s in one engine; recurrent layers are not handed over"
WRONG_BEHIND = "equal in one engine, but wrong over"
NOT_MADE = "not tried: this survey makes no small model of it"
WRONG = "wrong"
PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"
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


def outcome(family: str) -> str:
    """Return one of the constants, WRONG_BEHIND with transports, or the reason why the engine refuses the family."""
    folder = Path(tempfile.mkdtemp())
    try:
        try:
            config, _ = tiny_config(family)
            config.save_pretrained(folder)
            raw = read_config(folder)
            if find_architecture(raw) is None:
                read_facts(folder, raw)
            model = make_tiny(family)
            write_checkpoint(folder, model, 3)
        except SettingError as error:
            return _reason(error.message)
        except Exception:  # noqa: BLE001 - small sizes suit not every class, and what it raises has no one type
            return NOT_MADE
        try:
            found = asyncio.run(_alone(folder))
        except SettingError as error:
            return _reason(error.message)
        try:
            use_cache = family not in WRONG_WITH_A_CACHE
            expected = [reference_greedy(model, prompt, NUM_TOKENS, use_cache) for prompt in _PROMPTS]
        except AttributeError:  # of classes whose generate needs more than text
            return NOT_MADE
        if found != expected:
            return WRONG
        try:
            answers = {each: asyncio.run(_handed_over(folder, each)) for each in TRANSPORTS}
        except SettingError:
            return EQUAL_ALONE
        if None in answers.values():
            return EQUAL_ALONE
        wrong = [each for each in TRANSPORTS if answers[each] != expected]
        return f"{WRONG_BEHIND} {' and '.join(wrong)}" if wrong else EQUAL
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


def read_table() -> dict[str, str]:
    """Return each family's outcome, as docs/models.md has it."""
    found: dict[str, str] = {}
    for row in PAGE.read_text().partition(_START)[2].partition(_END)[0].splitlines()[2:]:
        reason, names = (cell.strip() for cell in row.strip("| ").rsplit("|", 1))
        found |= dict.fromkeys(names.split(", "), reason)
    return found


def write_table(outcomes: Mapping[str, str]) -> None:
    """Replace the table in docs/models.md."""
    rows = defaultdict(list)
    for family, found in sorted(outcomes.items()):
        rows[found].append(family)
    order = sorted(
        rows,
        key=lambda found: (found != EQUAL, found != EQUAL_ALONE, found == NOT_MADE, -len(rows[found]), found),
    )
    lines = [f"| {found} | {', '.join(rows[found])} |" for found in order]
    before, _, rest = PAGE.read_text().partition(_START)
    table = "\n".join(["| outcome | `model_type` |", "| -- | -- |", *lines])
    PAGE.write_text(f"{before}{_START}{table}\n{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found = read_table() if sys.argv[1:] else {}
    for family in sys.argv[1:] or families():
        found[family] = outcome(family)
        sys.stderr.write(f"{family}: {found[family]}\n")
    write_table(found)
