"""The properties of all services' settings."""

import pytest
from pydantic import ValidationError

from contract.options import MAX_SECONDS
from serving.grpc_options import internal_server_options, public_server_options
from serving.settings import Settings


class ExampleSettings(Settings):
    """One setting."""

    size: int = 3


def test_an_unknown_name_is_refused() -> None:
    """Law 10: a typo sets nothing, so it must be an error."""
    with pytest.raises(ValidationError, match=r"siz\n.*not permitted"):
        ExampleSettings.model_validate({"siz": 5})


def test_settings_cannot_be_changed() -> None:
    settings = ExampleSettings(size=4)
    with pytest.raises(ValidationError, match="frozen"):
        settings.size = 5
    assert settings.size == 4


class WaitingSettings(Settings):
    """One time."""

    some_seconds: float = 3.0


@pytest.mark.parametrize("value", ["inf", "nan", "1e300", "10000001"])
def test_a_time_that_no_clock_can_wait_for_is_refused_by_name(value: str) -> None:
    """It was accepted, and the first wait for it failed with an OverflowError."""
    with pytest.raises(ValidationError, match=r"some_seconds\n.*10000000 or less"):
        WaitingSettings.model_validate({"some_seconds": value})
    assert WaitingSettings.model_validate({"some_seconds": "1e7"}).some_seconds == 1e7


def test_the_longest_time_fits_what_grpc_takes() -> None:
    options = [
        *internal_server_options(MAX_SECONDS),
        *public_server_options(
            1,
            max_connections=1,
            handshake_seconds=MAX_SECONDS,
            idle_seconds=MAX_SECONDS,
            call_seconds=MAX_SECONDS,
        ),
    ]
    assert all(-(2**31) <= value < 2**31 for _, value in options)
