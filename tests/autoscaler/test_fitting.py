"""The coefficients of a timing model, fitted to times."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.timing_model import (
    PromptSample,
    StepSample,
    fit,
    fit_prefill,
    fit_step,
    fit_transfer,
)
from contract.errors import SettingError
from tests.autoscaler.cases import TIMING

LENGTHS = (16, 64, 256, 1024, 4096)


def test_exact_times_give_the_coefficients_of_the_model() -> None:
    prompts = [PromptSample(n, TIMING.prefill.seconds(n), TIMING.transfer.seconds(n)) for n in LENGTHS]
    steps = [
        StepSample(batch, batch * context, TIMING.step_seconds(batch, batch * context))
        for batch in (1, 4, 16, 64)
        for context in (50, 800)
    ]
    assert fit_prefill(prompts).seconds(2000) == pytest.approx(TIMING.prefill.seconds(2000))
    assert fit_prefill(prompts).seconds_per_token_squared == pytest.approx(2e-8)
    assert fit_transfer(prompts).seconds_per_token == pytest.approx(1e-6)
    fitted = fit_step(steps)
    assert fitted.base_seconds == pytest.approx(0.012)
    assert fitted.seconds_per_context_token == pytest.approx(4e-7)
    assert fitted.seconds_per_answer == pytest.approx(6e-4)


@given(st.integers(0, 1000))
def test_disturbed_times_are_met_within_their_disturbance(seed: int) -> None:
    noise = random.Random(seed)
    prompts = [
        PromptSample(n, TIMING.prefill.seconds(n) * noise.uniform(0.95, 1.05), 0.0)
        for n in LENGTHS
        for _ in range(3)
    ]
    fitted = fit_prefill(prompts)
    assert min(fitted.base_seconds, fitted.seconds_per_token, fitted.seconds_per_token_squared) >= 0.0
    for n in LENGTHS:
        assert fitted.seconds(n) == pytest.approx(TIMING.prefill.seconds(n), rel=0.07)


def test_no_coefficient_is_below_zero() -> None:
    """Times that fall with the length have a negative slope; the nearest model without one is constant."""
    assert fit([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [1.0, 1.0, 0.9])[1] == 0.0
    assert fit([(1.0, 1.0), (1.0, 2.0)], [1.0, 3.0]) == pytest.approx([0.0, 1.2], abs=0.3)
    assert fit([(0.0,)], [1.0]) == [0.0]


def test_a_service_without_transfers_has_none_in_its_model() -> None:
    assert fit_transfer([PromptSample(16, 0.1, 0.0)]).seconds(1000) == 0.0


def test_samples_of_one_length_or_size_are_refused() -> None:
    with pytest.raises(SettingError, match="several lengths"):
        fit_prefill([PromptSample(16, 0.1, 0.0)] * 3)
    with pytest.raises(SettingError, match="several sizes"):
        fit_step([StepSample(2, 100, 0.1), StepSample(2, 900, 0.2)])
