"""The timing model of a service that was never measured: a guess by the size of its weights and the kind of its device.

A guess may be wrong by an order of magnitude. It lets the law decide from the first second; the readings of the running
service then replace its scale (``demand.Corrections``), and the workers report their sizes themselves.
"""

from msgspec import structs

from autoscaler.signals import PoolSignals
from autoscaler.timing_model import PrefillTiming, StepTiming, TimingModel, TransferTiming

_CPU_BYTES_PER_SECOND = 10e9
"""Weights that a few cores read in a second: each step reads all of them once."""
_GPU_BYTES_PER_SECOND = 1e12
_CPU_PROMPT_BYTES_PER_SECOND = 50e9
"""The product of weights and prompt tokens that a few cores compute in a second: two operations for two bytes."""
_GPU_PROMPT_BYTES_PER_SECOND = 200e12
_LOADED_BYTES_PER_SECOND = 200e6
_START_SECONDS = 15.0
"""Time of a start without the weights: imports, devices, warm-up."""
_BASE_SECONDS = 0.005
_TOKEN_SECONDS = 2e-5
_ANSWERS = 32
_KV_TOKENS = 32_768


def default_timing(weight_bytes: int, *, has_gpu: bool) -> TimingModel:
    """Return the guess for a model with weights of this size; 0 if it is not known."""
    step = weight_bytes / (_GPU_BYTES_PER_SECOND if has_gpu else _CPU_BYTES_PER_SECOND)
    token = weight_bytes / (_GPU_PROMPT_BYTES_PER_SECOND if has_gpu else _CPU_PROMPT_BYTES_PER_SECOND)
    return TimingModel(
        origin="default",
        description=f"a guess for {weight_bytes / 1e9:.2f} GB of weights on a {'GPU' if has_gpu else 'CPU'}",
        prefill=PrefillTiming(base_seconds=_BASE_SECONDS + step, seconds_per_token=_TOKEN_SECONDS + token),
        decode=(
            StepTiming(
                base_seconds=_BASE_SECONDS + step,
                seconds_per_context_token=0.0,
                seconds_per_answer=_TOKEN_SECONDS + token,
            ),
        ),
        transfer=TransferTiming(base_seconds=_BASE_SECONDS),
        kv_tokens=_KV_TOKENS,
        max_answers=_ANSWERS,
        start_seconds=_START_SECONDS + weight_bytes / _LOADED_BYTES_PER_SECOND,
    )


def with_sizes(timing: TimingModel, decode: PoolSignals) -> TimingModel:
    """Return a guess with the sizes that the ready decode workers have; a measured model, or one without them, as it is."""
    if not timing.is_guess or not decode.num_ready or not decode.max_in_flight:
        return timing
    return structs.replace(
        timing,
        max_answers=max(1, decode.max_in_flight // decode.num_ready),
        kv_tokens=max(1, decode.max_tokens // decode.num_ready) if decode.max_tokens else timing.kv_tokens,
    )
