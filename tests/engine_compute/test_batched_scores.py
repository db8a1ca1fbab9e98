"""Scores and log probabilities of many rows: as many operations as for few, and each row as if it were alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from contract.sampling import SamplingParams
from engine.sampling.logits_processors import SamplingRow, adjusted, allowed_of
from engine.sampling.sampler import token_logprobs

VOCAB = 70


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def num_operations(run: Callable[[], object]) -> int:
    counter = Counter()
    with counter:
        run()
    return counter.count


def rows_of(number: int) -> list[SamplingRow]:
    """Return rows with every kind of change, and among them rows without any."""
    rows = []
    for index in range(number):
        sampling = SamplingParams(
            presence_penalty=0.5, frequency_penalty=0.25 * (index % 3), repetition_penalty=1.0 + 0.5 * (index % 2),
            logit_bias=((index % VOCAB, 3.0), ((index + 7) % VOCAB, -2.0)), min_tokens=9, max_tokens=20,
            allowed_token_ids=tuple(range(index % 5, VOCAB, 2)) if index % 3 else (),
        )  # fmt: skip
        answer = np.arange(index % 4, dtype=np.int32)
        known = (np.array([index % VOCAB, 5], dtype=np.int32), answer)
        rows.append(SamplingRow(sampling, (1,), 2 + len(answer), len(answer), *known))
        rows.append(SamplingRow(SamplingParams(), (), 3, 1))
    return rows


def test_changes_of_many_rows_are_as_many_operations_as_of_few() -> None:
    raw = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = rows_of(30)
    counts = [num_operations(partial(adjusted, raw[:n], rows[:n])) for n in (12, 60)]
    assert counts[0] == counts[1] < 60
    together = adjusted(raw, rows)
    for index, row in enumerate(rows):
        assert torch.equal(adjusted(raw[index : index + 1], [row])[0], together[index])


def test_log_probabilities_of_many_rows_are_as_many_operations_as_of_few() -> None:
    """Rows that require as many alternatives are computed together."""
    logits = torch.randn(80, VOCAB, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    tokens = [None if index % 7 == 3 else index % VOCAB for index in range(80)]
    wanted = [None if index % 5 == 4 else (0, 3, 100)[index % 3] for index in range(80)]
    counts = [num_operations(partial(token_logprobs, logits[:n], tokens[:n], wanted[:n])) for n in (16, 80)]
    assert counts[0] == counts[1] < 60
    together = token_logprobs(logits, tokens, wanted)
    for index, (token, k) in enumerate(zip(tokens, wanted, strict=True)):
        row = slice(index, index + 1)
        alone = token_logprobs(logits[row], tokens[row], wanted[row])
        assert together.logprobs[index] == alone.logprobs[0]
        assert together.logprob_token_ids[index] == alone.logprob_token_ids[0]
        assert together.sampled_token_ranks[index] == alone.sampled_token_ranks[0]
        is_wanted = token is not None and k is not None
        assert len(together.logprobs[index]) == (1 + min(k or 0, VOCAB) if is_wanted else 0)
        if token is not None and k is not None:
            expected = logits[index].float().log_softmax(0)
            assert together.logprobs[index][0] == float(expected[token])
            assert together.sampled_token_ranks[index] == int((expected > expected[token]).sum()) + 1


def test_masks_on_a_device_are_those_on_the_host() -> None:
    """The device unpacks words by shifts: the sign bit, and a vocabulary that ends within a word."""
    rng = np.random.default_rng(3)
    words = rng.integers(-(2**31), 2**31, (6, 3)).astype(np.int32)
    allowed = allowed_of(torch.from_numpy(words), VOCAB)
    rows = [SamplingRow(SamplingParams(), (), 1, 0, bitmask=own) for own in words]
    assert torch.equal(adjusted(torch.zeros(6, VOCAB), rows).isfinite(), allowed)
