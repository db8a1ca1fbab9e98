"""Logits processors: each change equals its definition, and rows do not affect each other."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contract.sampling import SamplingParams
from engine.sampling.logits_processors import SamplingRow, adjusted

VOCAB = 20
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
parameters = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 1.0, -0.25]),
        "repetition_penalty": st.sampled_from([1.0, 1.25, 0.5]),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4
        ).map(lambda biases: tuple(biases.items())),
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=5, unique=True).map(tuple),
        "grammar_allows": st.none() | st.sets(st.integers(0, VOCAB - 1), max_size=5),
        "min_tokens": st.sampled_from([0, 30]),
        "stop_token_ids": st.lists(st.integers(0, VOCAB + 3), max_size=2).map(tuple),
    }
)


def row_of(fields: dict[str, Any], prompt: list[int], answer: list[int]) -> SamplingRow:
    known = (np.array(prompt, np.int32), np.array(answer, np.int32))
    own = {"max_tokens": 100, **fields}
    may_follow = own.pop("grammar_allows", None)
    bits = None if may_follow is None else np.array([sum(1 << token for token in may_follow)], np.int32)
    return SamplingRow(
        SamplingParams(**own), (1,), len(prompt) + len(answer), len(answer), *known, bitmask=bits
    )


def by_definition(
    logits: list[float], fields: dict[str, Any], prompt: list[int], answer: list[int]
) -> list[float]:
    """Apply the definition token by token, in float64."""
    out = []
    for token, logit in enumerate(logits):
        is_allowed = not fields["allowed_token_ids"] or token in fields["allowed_token_ids"]
        is_allowed &= fields["grammar_allows"] is None or token in fields["grammar_allows"]
        value = (logit if is_allowed else -np.inf) + dict(fields["logit_bias"]).get(token, 0.0)
        if token in prompt or token in answer:
            penalty = fields["repetition_penalty"]
            value = value / penalty if value > 0 else value * penalty
        value -= fields["frequency_penalty"] * answer.count(token)
        value -= fields["presence_penalty"] * (token in answer)
        is_early = len(answer) < fields["min_tokens"]
        out.append(-np.inf if is_early and token in (1, *fields["stop_token_ids"]) else value)
    return out


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(parameters, tokens, tokens), min_size=1, max_size=4), seed=st.integers(0, 1000)
)
def test_every_change_equals_its_definition(
    rows: list[tuple[dict[str, Any], list[int], list[int]]], seed: int
) -> None:
    raw: Tensor = 4 * torch.randn((len(rows), VOCAB), generator=torch.Generator().manual_seed(seed))
    kept = raw.clone()
    scores = adjusted(raw, [row_of(*row) for row in rows])
    assert torch.equal(raw, kept)
    for i, row in enumerate(rows):
        expected = by_definition(raw[i].tolist(), *row)
        np.testing.assert_allclose(scores[i].numpy(), expected, rtol=1e-5, atol=1e-4)


def test_logits_are_not_copied_if_nothing_changes() -> None:
    raw = torch.zeros((2, VOCAB))
    assert adjusted(raw, [row_of({}, [1], [2])] * 2) is raw


def test_a_bitmask_covers_several_words_and_their_last_bits() -> None:
    """Token 31 is the sign bit of its word; a vocabulary may end in the middle of a word."""
    allowed = [0, 31, 32, 63, 69]
    bits = np.zeros(96, np.bool_)
    bits[[*allowed, 75]] = True
    words = np.packbits(bits, bitorder="little").view(np.int32)
    row = SamplingRow(SamplingParams(), (), 1, 0, bitmask=words)
    scores = adjusted(torch.zeros((1, 70)), [row])
    assert scores[0].isfinite().nonzero().flatten().tolist() == allowed
