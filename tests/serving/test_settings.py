"""What every service's settings have in common."""

import pytest
from pydantic import ValidationError

from serving.settings import Settings


class ExampleSettings(Settings):
    """One setting."""

    size: int = 3


def test_an_unknown_name_is_refused() -> None:
    """Law 10: a typo sets nothing, so it must not pass."""
    with pytest.raises(ValidationError, match=r"siz\n.*not permitted"):
        ExampleSettings.model_validate({"siz": 5})


def test_settings_cannot_be_changed() -> None:
    settings = ExampleSettings(size=4)
    with pytest.raises(ValidationError, match="frozen"):
        settings.size = 5
    assert settings.size == 4
