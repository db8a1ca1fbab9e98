"""Checks of fused operations on any device against torch's modules on the CPU. Only the checks import Triton."""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.config import RopeConfig
from engine.models.decoder import RMSNorm, inverse_frequencies, rotate, rotation

EPS = 1e-5
HEADS = [(4, 2, 16), (14, 2, 64), (12, 2, 128), (1, 1, 80), (9, 3, 96), (8, 8, 2)]
"""Query heads, KV heads, head_dim."""
_LIMITS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normally distributed numbers on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Compare by the relative error of the whole tensor; 16-bit results may differ by rounding. NaN fails."""
    error = (found.cpu().float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < _LIMITS[found.dtype]


def check_norm(size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Check with and without a residual, which is added to the states; each row is independent, bit by bit."""
    from engine.fused.rows import add_rms_norm

    norm = _norm_of(size, dtype, seed=1)
    states, added = (random(7, size, dtype=dtype, seed=seed) for seed in (2, 3))
    own, weight, more = states.to(device, copy=True), norm.weight.to(device), added.to(device)
    assert_near(add_rms_norm(own, None, weight, EPS), norm(states))
    output = add_rms_norm(own, more, weight, EPS)
    assert torch.equal(own.cpu(), states + added)
    assert_near(output, norm(states + added))
    alone = add_rms_norm(states[3:4].to(device, copy=True), more[3:4], weight, EPS)
    assert torch.equal(alone, output[3:4])


def check_turn(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, *, has_norms: bool
) -> None:
    """Check that heads are normalized as modules do it, then rotated in float32 and rounded once; KV is in its slots.

    Of six tokens one has no slot, one begins a block, whose other slots are zeroed, and all other slots stay as they are.
    """
    from engine.attention.backend import Slots
    from engine.fused.rows import HeadNorms, Heads, rotate_and_store

    num_heads, num_kv_heads, head_dim = sizes
    packed = random(6, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    frequencies = inverse_frequencies(RopeConfig("default", 10_000.0), head_dim)
    cos, sin = rotation(frequencies, torch.tensor([0, 3, 700, 1, 2, 0]), dtype)
    norms = [_norm_of(head_dim, dtype, seed) for seed in (1, 2)] if has_norms else None
    weights = HeadNorms(*(norm.weight.to(device) for norm in norms)) if norms else None
    places = [9, 2, -1, 15, 12, 5]
    num_cleared = [0, 0, 3, 0, 2, 0]
    pool = random(5, 3, 2, num_kv_heads, 4, head_dim, dtype=dtype, seed=3)
    own = pool.to(device, copy=True)
    slots = Slots(*(torch.tensor(each, dtype=torch.int32, device=device) for each in (places, num_cleared)))
    heads = Heads(num_heads, num_kv_heads, head_dim, weights, EPS)
    query = rotate_and_store(heads, packed.to(device), (cos.to(device), sin.to(device)), own[:, 1], slots)
    parts = torch.split(packed.view(6, -1, head_dim), [num_heads, num_kv_heads, num_kv_heads], dim=1)
    normed = [norm(part) for norm, part in zip(norms, parts, strict=False)] if norms else parts[:2]
    queries, keys = (part.float() for part in normed)
    turned = [states.to(dtype) for states in rotate(queries, keys, cos.float(), sin.float())]
    assert_near(query, turned[0])
    stored = own.cpu()
    for token, (place, count) in enumerate(zip(places, num_cleared, strict=True)):
        if place >= 0:
            block, offset = divmod(place, 4)
            assert_near(stored[block, 1, 0, :, offset], turned[1][token])
            assert torch.equal(stored[block, 1, 1, :, offset], parts[2][token])
            assert not stored[block, 1, :, :, offset + 1 : offset + 1 + count].any()
            stored[block, 1, :, :, offset : offset + 1 + count] = pool[
                block, 1, :, :, offset : offset + 1 + count
            ]
    assert torch.equal(stored, pool)


def check_gate(size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Check silu(gate) × up in float32, rounded once."""
    from engine.fused.rows import silu_and_mul

    packed = random(3, 2 * size, dtype=dtype)
    gate, up = torch.split(packed.float(), size, dim=1)
    assert_near(silu_and_mul(packed.to(device)), (F.silu(gate) * up).to(dtype))


def _norm_of(size: int, dtype: torch.dtype, seed: int) -> RMSNorm:
    norm = RMSNorm(size, EPS)
    norm.weight = torch.nn.Parameter(random(size, dtype=dtype, seed=seed), requires_grad=False)
    return norm
