"""``python -m engine.models.states_program FOLDER DTYPE``: prints the states of a model's recurrent layers, as JSON.

Only modules give their shapes, so the model is made without memory or weights, and its recurrent layers alone compute a new
text. A process of its own, since it needs torch, and the code of the model.
"""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import torch

from contract.errors import SettingError
from contract.state_layout import StateLayout
from engine.models.checkpoint import read_config
from engine.models.recurrent_layers import RecurrentLayers
from engine.models.transformers_rules import read_facts, refusing


def main() -> None:
    """Print the states, or {"problem"} if they cannot be found."""
    with redirect_stdout(sys.stderr):  # transformers may print there
        try:
            layout = find_states(Path(sys.argv[1]), sys.argv[2])
            found = {"states": None if layout is None else msgspec.to_builtins(layout)}
        except SettingError as error:
            found = {"problem": error.message}
    print(msgspec.json.encode(found).decode())  # noqa: T201 - its answer


def find_states(folder: Path, dtype: str) -> StateLayout | None:
    """Return the states of a model that transformers computes in this dtype; None without. Raises SettingError."""
    raw = read_config(folder)
    facts = read_facts(folder, raw)
    import transformers

    before = torch.get_default_dtype()
    numbers: torch.dtype = getattr(torch, dtype)
    with refusing(facts.class_name):
        torch.set_default_dtype(numbers)
        try:
            with torch.device("meta"), torch.inference_mode():
                whole: Any = getattr(transformers, facts.class_name)(facts.config)
                layers = RecurrentLayers(whole.eval())
                layers.survey_alone(torch.empty(1, 2, facts.text.hidden_size))
        finally:
            torch.set_default_dtype(before)
    return layers.layout


if __name__ == "__main__":
    main()
