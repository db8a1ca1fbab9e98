"""The states that ``kvbaton check`` finds without weights are those that a worker allocates, for each recurrent family."""

from pathlib import Path

import pytest
import torch

from engine.models.loading import load
from engine.models.states_program import find_states
from engine.models.transformers_types import TRIED
from tests.checkpoints import write_checkpoint
from tests.families.tiny_models import make_tiny, tiny_config

_STATE_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba"}

# In 16 bits its tiny model sends some tokens to other experts, which the self-check of a start refuses.
_FLOAT32_ALONE = {"kimi_linear"}


def recurrent_families() -> list[str]:
    """Return the types that are served and have recurrent layers."""
    found = []
    for family in sorted(TRIED):
        text = tiny_config(family)[0].get_text_config()
        if _STATE_LAYERS & set(getattr(text, "layer_types", None) or ()):
            found.append(family)
    return found


def check_promise(folder: Path, family: str, dtype: str) -> None:
    """Compare what is found on the meta device with what the loader finds by the weights."""
    write_checkpoint(folder, make_tiny(family), 3)
    promised = find_states(folder, dtype)
    assert promised is not None
    assert promised == load(folder, dtype, None, torch.device("cpu")).info.states, family


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_promises_what_is_allocated(tmp_path: Path, family: str, dtype: str) -> None:
    check_promise(tmp_path, family, dtype)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_the_check_promises_what_is_allocated_for_every_family(tmp_path: Path) -> None:
    families = recurrent_families()
    assert len(families) >= 26
    for family in families:
        check_promise(tmp_path / family, family, "float32" if family in _FLOAT32_ALONE else "bfloat16")
