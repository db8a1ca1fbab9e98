"""The models of the chaos tests: the demo model, and small ones whose caches are of other kinds.

transformers computes the small ones. They are made when a test starts, and their texts are short.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tests.chaos.clients import VOCABULARY
from tests.checkpoints import write_checkpoint
from tests.families.tiny_models import make_tiny

_BYTES = range(1, 250)
_SEED = 3


@dataclass(frozen=True)
class ChaosModel:
    """A model of a pool, with the questions that it is asked.

    family: of a small one, which is made; None: the demo model. vocabulary: the tokens of prompts. prompts, answers: least
    and largest number of tokens.
    """

    name: str
    family: str | None = None
    vocabulary: range = _BYTES
    prompts: tuple[int, int] = (10, 110)
    answers: tuple[int, int] = (20, 130)

    def folder(self, where: Path) -> Path:
        """Return the folder of the checkpoint, which is made within ``where`` if it is not there."""
        if self.family is None:
            return Path(str(resources.files("kvbaton"))) / "demo_model"
        folder = where / self.name
        if not folder.exists():
            write_checkpoint(folder, make_tiny(self.family), _SEED)
        return folder

    def ranges(self, longest_answer: int) -> dict[str, Any]:
        """Return the arguments of ``draw_questions``, for answers of at most so many tokens."""
        shortest, longest = self.answers
        answers = (shortest, min(longest, longest_answer))
        return {"prompts": self.prompts, "answers": answers, "vocabulary": self.vocabulary}


DEMO = ChaosModel("demo", vocabulary=VOCABULARY, prompts=(10, 600), answers=(20, 600))
RECURRENT = ChaosModel("recurrent", "qwen3_5_text")
"""Gated delta nets and attention in turn: a request has blocks, and a slot for its states."""
WINDOWS = ChaosModel("windows", "gemma3_text")
"""Layers that see the last tokens only, beside one that sees all: a request has blocks of two groups."""
