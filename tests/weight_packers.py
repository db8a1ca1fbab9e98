"""Pack weights by the published layouts of quantised formats; nothing is shared with the reader, and NumPy does it.

A packer maps a weight's name and values ``[num_outputs, num_inputs]`` to what is stored, and to the values of that.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors by the ends of their names, and the values of all of them together."""
Packer = Callable[[str, Tensor], Packed]

SIZE = 32
BLOCK = (48, 40)
"""Neither divides the sizes of the tiny models, so that all borders have smaller blocks."""
E2M1 = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32
)
_FP8 = torch.float8_e4m3fn
_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: Array, num_bits: int) -> Tensor:
    """Pack numbers along the last dimension into int32, the lowest bits first; the last word is filled with zeros."""
    in_word = 32 // num_bits
    padded = np.pad(codes.astype(np.uint32), ((0, 0), (0, -codes.shape[1] % in_word)))
    found = np.zeros((len(codes), padded.shape[1] // in_word), np.uint32)
    for place in range(in_word):
        found |= padded[:, place::in_word] << np.uint32(place * num_bits)
    return torch.from_numpy(found.view(np.int32))


def rounded(
    weight: Tensor, num_bits: int, size: int, has_zeros: bool, groups: Array | None = None
) -> tuple[Array, ...]:
    """Return codes from 0 on, scales and zero points ``[num_outputs, num_groups]``, and the values of the codes."""
    wide = weight.float().numpy()
    index = np.arange(wide.shape[1]) // size if groups is None else groups
    most = (1 << num_bits) - 1
    num_groups = int(index.max()) + 1
    scale = np.empty((len(wide), num_groups), np.float32)
    zero = np.full((len(wide), num_groups), 1 << num_bits - 1, np.int64)
    for group in range(num_groups):
        part = wide[:, index == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if has_zeros:
            scale[:, group] = (high - low) / most
            zero[:, group] = np.clip(np.round(-low / scale[:, group]), 0, most)
        else:
            scale[:, group] = np.maximum(-low, high) / (most / 2)
    scale = torch.from_numpy(scale).bfloat16().float().numpy()
    codes = np.clip(np.round(wide / scale[:, index]) + zero[:, index], 0, most).astype(np.int64)
    values = (codes - zero[:, index]).astype(np.float32) * scale[:, index]
    return codes, scale, zero, values


def packed_integers(
    num_bits: int, strategy: str, *, has_zeros: bool = False, has_order: bool = False
) -> Packer:
    """Return the packer of compressed-tensors' "pack-quantized"."""

    def pack(_: str, weight: Tensor) -> Packed:
        num_inputs = weight.shape[1]
        groups = np.random.default_rng(0).permutation(np.arange(num_inputs) // SIZE) if has_order else None
        size = SIZE if strategy == "group" else num_inputs
        if strategy == "tensor":
            flat = rounded(weight.reshape(1, -1), num_bits, weight.numel(), has_zeros)
            codes, values = (each.reshape(weight.shape) for each in (flat[0], flat[3]))
            scale, zero = flat[1].reshape(1), flat[2].reshape(1)
        else:
            codes, scale, zero, values = rounded(weight, num_bits, size, has_zeros, groups)
        tensors = {
            "weight_packed": words(codes, num_bits),
            "weight_scale": torch.from_numpy(scale).bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if has_zeros and strategy == "tensor":
            tensors["weight_zero_point"] = torch.from_numpy(zero - (1 << num_bits - 1)).to(torch.int8)
        elif has_zeros:
            tensors["weight_zero_point"] = words(zero.T, num_bits).t().contiguous()
        if groups is not None:
            tensors["weight_g_idx"] = torch.from_numpy(groups).int()
        return tensors, torch.from_numpy(values)

    return pack


def plain_integers(*, has_zeros: bool = False) -> Packer:
    """Return the packer of compressed-tensors' "int-quantized"."""

    def pack(_: str, weight: Tensor) -> Packed:
        codes, scale, zero, values = rounded(weight, 8, weight.shape[1], has_zeros)
        tensors = {
            "weight": torch.from_numpy(codes - 128).to(torch.int8),
            "weight_scale": torch.from_numpy(scale),
        }
        if has_zeros:
            tensors["weight_zero_point"] = torch.from_numpy(zero - 128).to(torch.int8)
        return tensors, torch.from_numpy(values)

    return pack


def fp8_blocks(scale_name: str, block: tuple[int, int] | None = BLOCK) -> Packer:
    """Return the packer of FP8 with a scale for each block, or (None) for a layer."""

    def pack(_: str, weight: Tensor) -> Packed:
        num_rows, num_columns = block or weight.shape
        stored = torch.empty(weight.shape, dtype=_FP8)
        values = torch.empty(weight.shape)
        scales = torch.empty(-(-weight.shape[0] // num_rows), -(-weight.shape[1] // num_columns))
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                place = (
                    slice(row * num_rows, (row + 1) * num_rows),
                    slice(column * num_columns, (column + 1) * num_columns),
                )
                scales[row, column] = weight[place].float().abs().max() / 448
                stored[place] = (weight[place].float() / scales[row, column]).to(_FP8)
                values[place] = stored[place].float() * scales[row, column]
        scale = scales if block else scales.reshape(())
        return {"weight": stored, scale_name: scale}, values

    return pack


def nearest_fp4(numbers: Array) -> Array:
    """Return the codes of the nearest numbers of FP4."""
    codes: Array = np.abs(numbers[..., None] - E2M1).argmin(-1)
    return codes.astype(np.uint8)


def nvfp4(_: str, weight: Tensor) -> Packed:
    """Pack as compressed-tensors' "nvfp4-pack-quantized", with the scale of the inputs of a layer."""
    groups = weight.float().numpy().reshape(len(weight), -1, 16)
    factor = torch.tensor([448 * 6.0]) / weight.float().abs().max()
    scale = (torch.from_numpy(np.abs(groups).max(-1)) / 6 * factor).to(_FP8)
    real = (scale.float() / factor).numpy()
    codes = nearest_fp4(groups / real[..., None])
    values = (E2M1[codes] * real[..., None]).reshape(weight.shape)
    flat = codes.reshape(weight.shape)
    return {
        "weight_packed": torch.from_numpy(flat[:, 0::2] | flat[:, 1::2] << 4),
        "weight_scale": scale,
        "weight_global_scale": factor,
        "input_global_scale": torch.ones(1),
    }, torch.from_numpy(values)


def mxfp4(_: str, weight: Tensor) -> Packed:
    """Pack experts ``[num_experts, num_inputs, num_outputs]`` as gpt-oss does."""
    wide = weight.float().transpose(1, 2).contiguous().numpy()
    blocks = wide.reshape(*wide.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1) / 4)).astype(np.int64)
    codes = nearest_fp4(blocks / np.exp2(exponents)[..., None])
    values = E2M1[codes] * np.exp2(exponents).astype(np.float32)[..., None]
    stored = {
        "_blocks": torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4),
        "_scales": torch.from_numpy((exponents + 127).astype(np.uint8)),
    }
    return stored, torch.from_numpy(values.reshape(wide.shape)).transpose(1, 2).contiguous()


def gptq(num_bits: int, *, is_second: bool = False, has_order: bool = False) -> Packer:
    """Return the packer of AutoGPTQ. is_second: zero points are stored as they are."""

    def pack(_: str, weight: Tensor) -> Packed:
        groups = (
            np.random.default_rng(0).permutation(np.arange(weight.shape[1]) // SIZE) if has_order else None
        )
        codes, scale, zero, values = rounded(weight, num_bits, SIZE, True, groups)
        stored = zero if is_second else (zero - 1) % (1 << num_bits)
        index = np.arange(weight.shape[1]) // SIZE if groups is None else groups
        return {
            "qweight": words(codes, num_bits).t().contiguous(),
            "qzeros": words(stored.T, num_bits),
            "scales": torch.from_numpy(scale.T.copy()).bfloat16(),
            "g_idx": torch.from_numpy(index).int(),
            "bias": torch.zeros(len(weight)),
        }, torch.from_numpy(values)

    return pack


def awq(_: str, weight: Tensor) -> Packed:
    """Pack as AutoAWQ's GEMM."""
    codes, scale, zero, values = rounded(weight, 4, SIZE, True)

    def interleaved(numbers: Array) -> Tensor:
        return words(
            numbers.T.reshape(numbers.shape[1], -1, 8)[..., _AWQ_PLACES].reshape(numbers.shape[1], -1), 4
        )

    tensors = {"qweight": interleaved(codes), "qzeros": interleaved(zero)}
    return tensors | {"scales": torch.from_numpy(scale.T.copy()).bfloat16()}, torch.from_numpy(values)


def four_bits(kind: str, *, is_nested: bool) -> Packer:
    """Return the packer of bitsandbytes. kind: "nf4" or "fp4"."""
    table = np.sort(np.random.default_rng(1).uniform(-1, 1, 16)).astype(np.float32)

    def pack(_: str, weight: Tensor) -> Packed:
        blocks = weight.float().numpy().reshape(-1, 32)
        absmax = np.abs(blocks).max(-1)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": 32,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        tensors = {"weight.quant_map": torch.from_numpy(table.copy())}
        if is_nested:
            outer_table = np.linspace(-1, 1, 256, dtype=np.float32)
            offset = float(np.float32(absmax.mean()))
            outer = np.abs(absmax - offset).reshape(-1, 16).max(-1)
            factor = np.repeat(outer, 16)
            codes = np.abs(((absmax - offset) / factor)[:, None] - outer_table).argmin(-1)
            absmax = outer_table[codes] * factor + np.float32(offset)
            state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
            tensors["weight.absmax"] = torch.from_numpy(codes.astype(np.uint8))
            tensors["weight.nested_absmax"] = torch.from_numpy(outer)
            tensors["weight.nested_quant_map"] = torch.from_numpy(outer_table.copy())
        else:
            tensors["weight.absmax"] = torch.from_numpy(absmax)
        numbers = np.abs((blocks / absmax[:, None])[..., None] - table).argmin(-1).astype(np.uint8)
        flat = numbers.reshape(-1)
        tensors["weight"] = torch.from_numpy((flat[0::2] << 4 | flat[1::2])[:, None])
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.frombuffer(
            bytearray(text), dtype=torch.uint8
        )
        return tensors, torch.from_numpy((table[numbers] * absmax[:, None]).reshape(weight.shape))

    return pack


def eight_bits(_: str, weight: Tensor) -> Packed:
    """Pack as LLM.int8."""
    most = weight.float().abs().amax(-1)
    stored = (weight.float() * 127 / most[:, None]).round().to(torch.int8)
    tensors = {"weight": stored, "SCB": most, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return tensors, stored.float() * (most / 127)[:, None]


def mixed(name: str, weight: Tensor) -> Packed:
    """Pack down_proj in 8 bits by channel, and all others in 4 bits by group."""
    if name.endswith("down_proj.weight"):
        return packed_integers(8, "channel")(name, weight)
    return packed_integers(4, "group", has_zeros=True)(name, weight)
