"""Blocks converted by a plan equal the whole prompt's KV, cut again: any block sizes, ranks, dtypes, pieces."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contract.layout import KVLayout, Side
from engine.kv_cache.memory import TORCH_DTYPES
from kv_transfer.data.converting import convert_blocks, convert_in_pool
from kv_transfer.protocol.orders import Conversion
from kv_transfer.protocol.plan import TransferPlan
from tests.kv_transfer.test_plan import ranges

UNTOUCHED = 7.0


def prompt_kv(plan: TransferPlan, num_tokens: int) -> Tensor:
    """Return ``[num_layers, parts, all heads, num_tokens, head_dim]`` in the sender's dtype.

    Many values round in bfloat16.
    """
    layout = plan.theirs.layout
    num_parts = len(layout.parts)
    shape = (layout.num_layers, num_parts, plan.theirs.num_kv_heads, num_tokens, layout.head_dim)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(num_tokens)) * 100
    return noise.to(TORCH_DTYPES[layout.dtype])


def cut(kv: Tensor, side: Side, rank: int, first: int, end: int) -> Tensor:
    """Yield blocks ``first``..``end`` - 1 of a rank; places after the prompt's end hold UNTOUCHED."""
    layout = side.layout
    heads = kv[:, :, side.heads(rank).start : side.heads(rank).stop]
    blocks = []
    for block in range(first, end):
        tokens = heads[:, :, :, block * layout.block_size : (block + 1) * layout.block_size]
        whole = torch.full(layout.shape, UNTOUCHED).to(TORCH_DTYPES[layout.dtype])
        whole[:, :, :, : tokens.shape[3]] = tokens.to(whole.dtype)
        blocks.append(whole)
    return torch.stack(blocks)


def as_bytes(blocks: Tensor) -> memoryview:
    return memoryview(bytearray(blocks.contiguous().view(-1).view(torch.uint8).numpy().tobytes()))


def room_for(layout: KVLayout, count: int) -> list[memoryview]:
    return [
        as_bytes(torch.full(layout.shape, UNTOUCHED).to(TORCH_DTYPES[layout.dtype])) for _ in range(count)
    ]


@settings(deadline=None, max_examples=40)
@given(ranges(), st.integers(1, 8))
def test_converted_blocks_are_the_prompt_cut_again(
    case: tuple[TransferPlan, int, int, int], most: int
) -> None:
    plan, num_tokens, first, end = case
    kv = prompt_kv(plan, num_tokens)
    for rank in range(plan.ours.num_ranks):
        targets = room_for(plan.ours.layout, end - first)
        for piece_first, piece_end in plan.pieces(first, end, most):
            blocks = plan.source_blocks(piece_first, piece_end, num_tokens)
            sources = {
                run.theirs: as_bytes(cut(kv, plan.theirs, run.theirs, blocks.start, blocks.stop))
                for run in plan.head_runs(rank)
            }
            part = targets[piece_first - first : piece_end - first]
            convert_blocks(Conversion(plan, first, end, num_tokens, rank), sources, piece_first, part)
        expected = cut(kv.to(TORCH_DTYPES[plan.ours.layout.dtype]), plan.ours, rank, first, end)
        assert b"".join(targets) == bytes(as_bytes(expected))


@settings(deadline=None, max_examples=40)
@given(ranges(), st.integers(1, 8))
def test_blocks_converted_within_a_pool_are_the_prompt_cut_again(
    case: tuple[TransferPlan, int, int, int], most: int
) -> None:
    """Slots behind the prompt's end are zero; no other block changes, nor do the landed ones."""
    plan, num_tokens, first, end = case
    kv, ours = prompt_kv(plan, num_tokens), plan.ours.layout
    expected_kv = kv.to(TORCH_DTYPES[ours.dtype])
    for rank in range(plan.ours.num_ranks):
        pool = cut(expected_kv[:, :, :, :0], plan.ours, rank, 0, end - first + 2)
        block_ids = list(range(1, end - first + 1))[::-1]
        for piece_first, piece_end in plan.pieces(first, end, most):
            blocks = plan.source_blocks(piece_first, piece_end, num_tokens)
            landed = {
                each: cut(kv, plan.theirs, each, blocks.start, blocks.stop + 1)
                for each in plan.ranks_of(rank)
            }
            before = {each: content.clone() for each, content in landed.items()}
            chosen = block_ids[piece_first - first : piece_end - first]
            conversion = Conversion(plan, first, end, num_tokens, rank)
            convert_in_pool(conversion, landed, piece_first, pool, chosen)
            assert all(torch.equal(landed[each], before[each]) for each in landed)
        expected = cut(expected_kv, plan.ours, rank, first, end)
        expected[-1, :, :, :, num_tokens - (end - 1) * ours.block_size :] = 0
        assert torch.equal(pool[block_ids], expected)
        assert bool((pool[[0, -1]] == UNTOUCHED).all())


@settings(deadline=None, max_examples=40)
@given(ranges(), st.integers(1, 8), st.data())
def test_tokens_before_the_first_that_is_handed_over_become_zero(
    case: tuple[TransferPlan, int, int, int], most: int, data: st.DataObject
) -> None:
    """The blocks of a window may begin amid the first one of ours, and what lies there may be no number."""
    plan, num_tokens, first, end = case
    size, theirs = plan.ours.layout.block_size, plan.theirs.layout.block_size
    within = range(first * size // theirs * theirs, min((first + 1) * size, num_tokens), theirs)
    cut_off = replace(plan, first_token=data.draw(st.sampled_from(within)))
    kv, dtype = prompt_kv(plan, num_tokens), TORCH_DTYPES[plan.ours.layout.dtype]
    sent = kv.clone()
    sent[:, :, :, : cut_off.first_token] = torch.nan
    expected_kv = kv.to(dtype)
    expected_kv[:, :, :, : cut_off.first_token] = 0
    targets = room_for(plan.ours.layout, end - first)
    pool = cut(expected_kv[:, :, :, :0], plan.ours, 0, 0, end - first)
    conversion = Conversion(cut_off, first, end, num_tokens)
    for piece_first, piece_end in cut_off.pieces(first, end, most):
        blocks = cut_off.source_blocks(piece_first, piece_end, num_tokens)
        assert blocks.start * theirs >= cut_off.first_token
        landed = {each: cut(sent, plan.theirs, each, blocks.start, blocks.stop) for each in plan.ranks_of()}
        sources = {each: as_bytes(content) for each, content in landed.items()}
        convert_blocks(conversion, sources, piece_first, targets[piece_first - first : piece_end - first])
        convert_in_pool(conversion, landed, piece_first, pool, range(piece_first - first, piece_end - first))
    expected = cut(expected_kv, plan.ours, 0, first, end)
    assert b"".join(targets) == bytes(as_bytes(expected))
    expected[-1, :, :, :, num_tokens - (end - 1) * size :] = 0
    assert torch.equal(pool, expected)
