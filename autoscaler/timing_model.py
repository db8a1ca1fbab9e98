"""The times of a worker's steps, as formulas with a few coefficients, and the JSON file that holds them.

A prompt of n tokens takes a + b·n + c·n². A step that continues answers takes a + b·(context tokens of all) + c·(answers),
with other coefficients from some number of answers on (the shape of DistServe's model, Zhong et al. 2024). A hand-over takes
a latency and a time for each token.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from contract.decoding import DECODING_ERRORS, json_decoder
from contract.errors import SettingError

Seconds = Annotated[float, Meta(ge=0.0)]
Count = Annotated[int, Meta(ge=1)]


class PrefillTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of computing a prompt."""

    base_seconds: Seconds
    seconds_per_token: Seconds
    seconds_per_token_squared: Seconds = 0.0

    def seconds(self, num_tokens: float, squared_variation: float = 0.0) -> float:
        """Return the mean time of prompts of ``num_tokens`` in the mean.

        squared_variation: variance of their lengths, divided by the square of the mean.
        """
        squared = num_tokens**2 * (1.0 + squared_variation)
        return (
            self.base_seconds + self.seconds_per_token * num_tokens + self.seconds_per_token_squared * squared
        )


class StepTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of a step that continues ``from_batch`` answers or more."""

    from_batch: Count = 1
    base_seconds: Seconds
    seconds_per_context_token: Seconds
    seconds_per_answer: Seconds


class TransferTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time for which an answer waits for the KV of its prompt."""

    base_seconds: Seconds = 0.0
    seconds_per_token: Seconds = 0.0

    def seconds(self, num_tokens: float) -> float:
        """Return the time of a prompt of ``num_tokens``."""
        return self.base_seconds + self.seconds_per_token * num_tokens


class TimingModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of one model on one kind of worker.

    kv_tokens: tokens that the KV pool of a worker holds. max_answers: answers that it decodes at once. start_seconds: from
    the order to start a worker to its first credit. origin: how the figures were obtained; "default" ones are a guess by the
    size of the model, which the law corrects without narrow bounds. description: free text about the model, the device and
    the load of the measurement.
    """

    format: Literal["kvbaton-timing/1"] = "kvbaton-timing/1"
    origin: Literal["measured", "modelled", "default"] = "modelled"
    description: str = ""
    prefill: PrefillTiming
    decode: Annotated[tuple[StepTiming, ...], Meta(min_length=1)]
    transfer: TransferTiming = TransferTiming()
    kv_tokens: Count
    max_answers: Count
    start_seconds: Annotated[float, Meta(gt=0.0)]

    @property
    def is_guess(self) -> bool:
        """True if nothing was measured, and only readings of the running service show the times."""
        return self.origin == "default"

    def step_seconds(self, num_answers: float, context_tokens: float) -> float:
        """Return the time of a step over answers that have ``context_tokens`` together; 0 without answers."""
        if num_answers <= 0:
            return 0.0
        piece = self.decode[0]
        for later in self.decode[1:]:
            if num_answers >= later.from_batch:
                piece = later
        return (
            piece.base_seconds
            + piece.seconds_per_context_token * context_tokens
            + piece.seconds_per_answer * num_answers
        )

    def check(self) -> None:
        """Raise SettingError if the pieces of the decode step are not in order from 1 on."""
        starts = [piece.from_batch for piece in self.decode]
        if starts[0] != 1 or sorted(set(starts)) != starts:
            raise SettingError(
                f"decode has pieces from {starts} answers on; the first must begin at 1, and each later one above the last"
            )


_DECODER: msgspec.json.Decoder[TimingModel] = json_decoder(TimingModel)


def read_timing(path: Path) -> TimingModel:
    """Read a timing file. Raises SettingError, which names the file and the field, if it cannot be used."""
    try:
        model = _DECODER.decode(path.read_bytes())
        model.check()
    except OSError as error:
        raise SettingError(f"timing file {path} cannot be read: {error.strerror}") from error
    except DECODING_ERRORS as error:
        raise SettingError(f"timing file {path} cannot be used: {error}") from error
    except SettingError as error:
        raise SettingError(f"timing file {path} cannot be used: {error.message}") from error
    return model


def write_timing(path: Path, model: TimingModel) -> None:
    """Write a timing file, readable by people. Raises SettingError if the model or the path cannot be used."""
    model.check()
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n")
    except OSError as error:
        raise SettingError(f"timing file {path} cannot be written: {error.strerror}") from error
