"""``python -m engine.models.facts_program FOLDER``: prints the facts in transformers' configuration of a model, as JSON.

A process of its own, in which torch is hidden, and transformers' packages are imported without the code of their
``__init__``: transformers would import torch beside the configuration, and read all of its 400 folders, which takes longer
than everything else here. A model that fails with packages made so is read again with the real ones.
"""

import json
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from contract.errors import SettingError
from engine.models.checkpoint import read_config
from engine.models.transformers_rules import read_facts

_PACKAGE = "transformers"
# Names that are imported from the package itself.
_PLACES = {"AutoConfig": f"{_PACKAGE}.models.auto.configuration_auto"}


def main() -> None:
    """Print the numbers and shapes of ``TransformersFacts``, or {"problem"} if it is refused."""
    try:
        found = _read(Path(sys.argv[1]))
    except SettingError as error:
        found = {"problem": error.message}
    print(json.dumps(found))  # noqa: T201 - its answer


def _read(folder: Path) -> dict[str, Any]:
    sys.modules["torch"] = None  # type: ignore[assignment] # the documented way to make an import fail
    is_hollow = _import_without_init()
    raw = read_config(folder)
    try:
        facts = read_facts(folder, raw)
    except SettingError as error:
        if not is_hollow or error.__cause__ is None:
            raise
        for module in [each for each in sys.modules if each.partition(".")[0] == _PACKAGE]:
            del sys.modules[module]
        facts = read_facts(folder, raw)
    return {
        "num_positions": facts.num_positions,
        "max_positions": facts.max_positions,
        "is_composite": facts.is_composite,
        "is_tried": facts.is_tried,
        "kv_shapes": facts.kv_shapes,
        "has_states": facts.has_states,
        "windows": facts.windows,
        "num_experts": facts.num_experts,
        "unread": facts.unread,
    }


def _import_without_init() -> bool:
    """Put packages without their code in place of transformers and its models; return False if it is not installed."""
    path = None
    for name in (_PACKAGE, f"{_PACKAGE}.models"):
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.submodule_search_locations is None:
            return False
        module: Any = ModuleType(name)
        module.__spec__ = spec
        module.__path__ = path = spec.submodule_search_locations
        module.__version__ = version(_PACKAGE)
        module.__getattr__ = _found
        sys.modules[name] = module
    return True


def _found(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(name)
    return getattr(import_module(_PLACES[name]), name)


if __name__ == "__main__":
    main()
