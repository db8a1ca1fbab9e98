"""The sampler: law 6, supports of top-k and top-p, distribution, min_tokens, log probabilities, NaN."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from contract.sampling import SamplingParams
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.randomness import UNIFORM_BITS, uniform_bits, uniform_bits_of
from engine.sampling.sampler import invert, sample, scaled

VOCAB = 50


def make_row(
    position: int = 10, num_generated: int = 0, eos: tuple[int, ...] = (), **fields: Any
) -> SamplingRow:
    return SamplingRow(SamplingParams(**{"max_tokens": 100, **fields}), eos, position, num_generated)


def draw(logits: Tensor, row: SamplingRow) -> int | None:
    return sample(logits[None], [row]).token_ids[0]


def random_logits(seed: int, num_rows: int = 1) -> Tensor:
    return 3 * torch.randn((num_rows, VOCAB), generator=torch.Generator().manual_seed(seed))


parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, 20, 1000]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "logprobs": st.sampled_from([None, 0, 4]),
        "min_tokens": st.integers(0, 3),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
        "min_p": st.sampled_from([0.0, 0.2, 1.0]),
        "logit_bias": st.sampled_from([(), ((3, 5.0), (7, -100.0))]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(row_fields=st.lists(parameters, min_size=1, max_size=6), shuffle=st.randoms(use_true_random=False))
def test_a_token_does_not_depend_on_the_batch(row_fields: list[dict[str, Any]], shuffle: Any) -> None:
    """Law 6: alone, in any order, beside any others: the same token with the same log probabilities."""
    logits = random_logits(1, len(row_fields))
    rows = [make_row(position=index, **fields) for index, fields in enumerate(row_fields)]
    together = sample(logits, rows)
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    mixed = sample(logits[order], [rows[index] for index in order])
    for place, index in enumerate(order):
        alone = sample(logits[index : index + 1], [rows[index]])
        assert together.token_ids[index] == mixed.token_ids[place] == alone.token_ids[0]
        if alone.logprobs is not None and together.logprobs is not None:
            assert together.logprobs.logprobs[index] == alone.logprobs.logprobs[0]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), k=st.integers(1, VOCAB), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_top_k_draws_from_the_k_best(seed: int, k: int, temperature: float) -> None:
    logits = random_logits(seed)[0]
    best = logits.topk(k).indices.tolist()
    for position in range(8):
        assert draw(logits, make_row(position, temperature=temperature, top_k=k, seed=seed)) in best


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), p=st.floats(0.01, 0.99))
def test_top_p_draws_from_the_smallest_set_with_that_probability(seed: int, p: float) -> None:
    logits = random_logits(seed)[0]
    probabilities, order = logits.double().softmax(0).sort(descending=True)
    size = int((probabilities.cumsum(0) < p - 1e-9).sum()) + 1
    for position in range(8):
        assert draw(logits, make_row(position, temperature=1.0, top_p=p, seed=seed)) in order[:size].tolist()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), p=st.floats(0.001, 1.0), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_min_p_keeps_tokens_that_are_probable_relative_to_the_best(
    seed: int, p: float, temperature: float
) -> None:
    """The share is measured after temperature, and before anything else is removed."""
    logits = random_logits(seed)[0]
    probabilities = (logits.double() / temperature).softmax(0)
    kept = (probabilities >= p * probabilities.max() - 1e-9).nonzero()[:, 0].tolist()
    for position in range(8):
        row = make_row(position, temperature=temperature, min_p=p, seed=seed)
        assert draw(logits, row) in kept


def test_top_k_comes_before_top_p_and_ties_keep_the_lowest_ids() -> None:
    flat = torch.zeros(VOCAB)
    assert {draw(flat, make_row(i, top_k=4)) for i in range(200)} == {0, 1, 2, 3}
    assert {draw(flat, make_row(i, top_k=4, top_p=0.5)) for i in range(200)} == {0, 1}
    assert {draw(flat, make_row(i, top_p=0.1)) for i in range(200)} == set(range(VOCAB // 10))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_are_drawn_as_often_as_their_probability(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    num_draws = 4000
    counts = Counter(draw(logits, make_row(i, temperature=temperature, seed=9)) for i in range(num_draws))
    for token, probability in enumerate((logits / temperature).softmax(0).tolist()):
        deviation = math.sqrt(num_draws * probability * (1 - probability))
        assert abs(counts[token] - num_draws * probability) < 4 * deviation


def test_the_inverse_runs_in_the_order_of_the_vocabulary() -> None:
    """With equal probabilities the token is floor(u × vocabulary)."""
    for position in range(50):
        expected = uniform_bits(3, position) * VOCAB >> UNIFORM_BITS
        assert draw(torch.zeros(VOCAB), make_row(position, seed=3)) == expected


def test_every_unit_of_weight_belongs_to_its_token() -> None:
    row = [0, 3, 0, 2, 0]
    assert invert(torch.tensor([row] * 5), torch.arange(5)).tolist() == [1, 1, 1, 3, 3]


@given(uniform=st.integers(0, 2**UNIFORM_BITS - 1), total=st.integers(0, 2**58 - 1))
@example(uniform=2**UNIFORM_BITS - 1, total=2**58 - 1)
def test_a_share_of_the_total_is_exact(uniform: int, total: int) -> None:
    """64-bit arithmetic gives the result that Python computes with 111 bits."""
    share = scaled(torch.tensor([uniform]), torch.tensor([total]))
    assert share.tolist() == [uniform * total >> UNIFORM_BITS]


def test_other_rows_change_no_draw() -> None:
    logits, rows = random_logits(4, 30), [make_row(index, seed=index) for index in range(30)]
    alone = [draw(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)]
    assert sample(logits, rows).token_ids == alone


def test_seed_and_position_determine_the_draw() -> None:
    logits = random_logits(4)[0]
    stream = [draw(logits, make_row(i, seed=1)) for i in range(30)]
    assert stream == [draw(logits, make_row(i, seed=1)) for i in range(30)]
    assert stream != [draw(logits, make_row(i, seed=2)) for i in range(30)]
    assert stream != [draw(logits, make_row(i + 1, seed=1)) for i in range(30)]
    assert len(set(stream)) > 1


def philox_4x64(counter: int, key: int) -> int:
    """Return the first of the four words of Philox 4x64 with 10 rounds, as in its paper."""
    mask = 2**64 - 1
    c0, c1, c2, c3 = counter & mask, counter >> 64 & mask, counter >> 128 & mask, counter >> 192
    k0, k1 = key & mask, key >> 64
    for _ in range(10):
        product0, product1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = product1 >> 64 ^ c1 ^ k0, product1 & mask, product0 >> 64 ^ c3 ^ k1, product0 & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return c0


@given(seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 2**32))
def test_uniform_bits_are_philox(seed: int, position: int) -> None:
    """Law 6: a replay on another machine or version samples the same tokens, so the generator may never change.

    The reference reproduces the known answer of its authors. Counter 0 is never used: position 0 is counter 1.
    """
    assert philox_4x64(0, 0) == 0x16554D9ECA36314C
    expected = philox_4x64(position + 1, seed % 2**128) >> (64 - UNIFORM_BITS)
    assert uniform_bits(seed, position) == expected
    other = philox_4x64(position + 1, 5) >> (64 - UNIFORM_BITS)
    for repeats in (1, 30):  # one by one, and together
        found = uniform_bits_of([seed, seed, 5] * repeats, [0, position, position] * repeats)
        assert found.tolist() == [uniform_bits(seed, 0), expected, other] * repeats


def test_greedy_takes_the_lowest_id_of_the_best() -> None:
    logits = torch.zeros(VOCAB)
    logits[[7, 30]] = 1.0
    assert draw(logits, make_row(temperature=0.0, seed=5)) == 7


def test_min_tokens_forbids_the_end() -> None:
    logits = torch.zeros(VOCAB)
    logits[3], logits[4], logits[5] = 30.0, 20.0, 10.0
    fields: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (4,)}
    assert draw(logits, make_row(num_generated=1, eos=(3,), **fields)) == 5
    assert draw(logits, make_row(num_generated=2, eos=(3,), **fields)) == 3
    assert draw(logits, make_row(num_generated=1, eos=(3,), ignore_eos=True, **fields)) == 3
    sampled: dict[str, Any] = {"temperature": 1.0, "min_tokens": 2, "stop_token_ids": (4,)}
    assert draw(logits, make_row(num_generated=0, eos=(3, 999), **sampled)) == 5


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    """B9: the sampled token first, then the k best; its rank; computed before temperature and min_tokens."""
    logits = random_logits(6)[0]
    best = logits.argsort(descending=True).tolist()
    row = make_row(temperature=0.0, logprobs=3, min_tokens=1, stop_token_ids=(best[0],))
    samples = sample(logits[None], [row])
    assert samples.token_ids == [best[1]]
    assert samples.logprobs is not None
    assert samples.logprobs.logprob_token_ids == [[best[1], *best[:3]]]
    assert samples.logprobs.sampled_token_ranks == [2]
    expected = logits.log_softmax(0)[[best[1], *best[:3]]]
    torch.testing.assert_close(torch.tensor(samples.logprobs.logprobs[0]), expected)


def test_rows_without_requested_logprobs_have_none() -> None:
    samples = sample(random_logits(1, 2), [make_row(), make_row(logprobs=0)])
    assert samples.logprobs is not None
    assert [len(ids) for ids in samples.logprobs.logprob_token_ids] == [0, 1]
    assert sample(random_logits(1, 2), [make_row(), make_row()]).logprobs is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_of_nan_does_not_affect_the_others(temperature: float, bad: float) -> None:
    logits = random_logits(2, 3)
    rows = [make_row(i, temperature=temperature, logprobs=2, seed=8) for i in range(3)]
    clean = sample(logits, rows)
    logits[1, [4, 9]] = bad
    samples = sample(logits, rows)
    assert samples.token_ids == [clean.token_ids[0], None, clean.token_ids[2]]
    assert samples.num_nans == [0, 2, 0]
    assert samples.logprobs is not None
    assert [len(ids) for ids in samples.logprobs.logprob_token_ids] == [3, 0, 3]


def test_a_nan_counts_even_if_its_token_is_forbidden() -> None:
    logits = random_logits(1)
    logits[0, 4] = torch.nan
    samples = sample(logits, [make_row(min_tokens=1, stop_token_ids=(4,))])
    assert (samples.token_ids, samples.num_nans) == ([None], [1])


def test_a_row_where_everything_is_forbidden_draws_nothing() -> None:
    row = make_row(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    assert sample(random_logits(1), [row]).token_ids == [None]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_accepted(dtype: torch.dtype) -> None:
    logits = random_logits(3).to(dtype)
    assert draw(logits[0], make_row(temperature=0.0)) == int(logits[0].argmax())
