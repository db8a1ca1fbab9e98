"""``python -m engine.models.facts_program FOLDER``: prints the facts in transformers' configuration of a model, as JSON.

A process of its own, in which torch is hidden: transformers would import it beside the configuration, which takes three
times as long as everything else here.
"""

import json
import sys
from pathlib import Path

from contract.errors import SettingError
from engine.models.checkpoint import read_config
from engine.models.transformers_rules import read_facts


def main() -> None:
    """Print {"num_positions", "is_tried", "kv_shape"}, or {"problem"} for a folder that is refused."""
    sys.modules["torch"] = None  # type: ignore[assignment] # the documented way to make an import fail
    folder = Path(sys.argv[1])
    try:
        facts = read_facts(folder, read_config(folder))
    except SettingError as error:
        print(json.dumps({"problem": error.message}))  # noqa: T201 - its answer
        return
    found = {
        "num_positions": facts.num_positions,
        "is_tried": facts.is_tried,
        "kv_shape": facts.kv_shape,
    }
    print(json.dumps(found))  # noqa: T201 - its answer


if __name__ == "__main__":
    main()
