"""The model of times and its file."""

from pathlib import Path

import msgspec
import pytest

from autoscaler.timing_model import StepTiming, TimingModel, read_timing, write_timing
from contract.errors import SettingError
from tests.autoscaler.cases import TIMING

PIECES = (
    StepTiming(base_seconds=0.02, seconds_per_context_token=6e-7, seconds_per_answer=4e-5),
    StepTiming(from_batch=95, base_seconds=0.007, seconds_per_context_token=5e-7, seconds_per_answer=2e-4),
)


def test_a_prompt_takes_a_polynomial_and_its_variation_lengthens_the_mean() -> None:
    assert TIMING.prefill.seconds(1000) == pytest.approx(0.02 + 0.4 + 0.02)
    assert TIMING.prefill.seconds(1000, squared_variation=1.0) == pytest.approx(0.02 + 0.4 + 0.04)


def test_a_step_has_the_coefficients_of_its_batch() -> None:
    model = msgspec.structs.replace(TIMING, decode=PIECES)
    assert model.step_seconds(94, 10_000) == pytest.approx(0.02 + 0.006 + 94 * 4e-5)
    assert model.step_seconds(95, 10_000) == pytest.approx(0.007 + 0.005 + 95 * 2e-4)
    assert model.step_seconds(0, 0) == 0.0


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    model = msgspec.structs.replace(TIMING, decode=PIECES, origin="measured", description="one device")
    write_timing(tmp_path / "timing.json", model)
    assert read_timing(tmp_path / "timing.json") == model


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "kvbaton-timing/2"}, "$.format"),
        ({"kv_tokens": 0}, "$.kv_tokens"),
        ({"start_seconds": 0.0}, "$.start_seconds"),
        ({"decode": []}, "$.decode"),
        ({"prefill": {"base_seconds": -1.0, "seconds_per_token": 0.1}}, "$.prefill.base_seconds"),
        ({"prefill": {"base_seconds": 1.0}}, "seconds_per_token"),
        ({"unknown": 1}, "unknown"),
        ({"decode": msgspec.to_builtins(PIECES[1:])}, "begin at 1"),
        ({"decode": msgspec.to_builtins(PIECES[:1] * 2)}, "above the last"),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_field(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    path = tmp_path / "timing.json"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(TIMING), **change}))
    with pytest.raises(SettingError) as caught:
        read_timing(path)
    assert named in caught.value.message
    assert str(path) in caught.value.message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "timing.json"
    path.write_bytes(content)
    with pytest.raises(SettingError, match="cannot be used"):
        read_timing(path)
    with pytest.raises(SettingError, match="cannot be read"):
        read_timing(tmp_path / "missing.json")


def test_a_model_with_pieces_out_of_order_is_not_written(tmp_path: Path) -> None:
    model: TimingModel = msgspec.structs.replace(TIMING, decode=PIECES[1:])
    with pytest.raises(SettingError, match="begin at 1"):
        write_timing(tmp_path / "timing.json", model)
    assert not (tmp_path / "timing.json").exists()
