"""The decoder of fused operations against its modules, under Triton's interpreter (`make test-triton`)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.backend import create_backend
from engine.attention.splits import CHUNK_SPLIT, DECODE_SPLIT
from engine.attention.triton_paged import PagedAttention
from engine.compute.forward import fused
from engine.compute.forward_plain import PlainForward
from engine.compute.piecewise import PiecewiseGraphs
from engine.compute.profiling import null_layers, profile_inputs, reserving_steps
from engine.fused.decoder import FusedDecoder
from engine.fused.small_batch import SmallBatch
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM
from engine.models.language_model import LanguageModel
from engine.models.linear import Product
from engine.models.loading import LoadedModel, load
from tests.attention_cases import CPU
from tests.checkpoints import make_checkpoint
from tests.fakes.engine.collectives import CountedGroup
from tests.fakes.engine.graphs import RerunRecorder
from tests.fused_cases import HEADS, check_gate, check_norm, check_turn, random
from tests.graph_rig import CASE, MAX_LEN, NUM_BLOCKS, Rig
from tests.linear_ops import Doubled, DoubledMatrix, double_weights, replace_layers

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings(
        "ignore:Conversion of an array:DeprecationWarning"
    ),  # raised by the interpreter
]

DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 20},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
}


def fused_model(loaded: LoadedModel) -> LanguageModel:
    assert isinstance(loaded.model, CausalLM)
    assert isinstance(loaded.config, DecoderConfig)
    return fused(loaded.model, loaded.config, "triton")


@pytest.mark.parametrize("has_small_batch", [False, True])
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_equals_its_modules(tmp_path: Path, family: str, has_small_batch: bool) -> None:
    """Chunks and decodes, eager and replayed, with biases, windows, head norms and tied embeddings.

    has_small_batch: small-batch products by kernels of their own, as in bfloat16, which the interpreter cannot multiply.
    """
    make_checkpoint(tmp_path, family, **DECODERS[family])
    loaded = load(tmp_path, "float32", None, CPU)
    assert isinstance(loaded.model, CausalLM)
    assert isinstance(loaded.config, DecoderConfig)
    small_batch = SmallBatch(CPU, [torch.float32] if has_small_batch else [])
    rig = Rig(loaded, create_backend("triton"), FusedDecoder(loaded.model, loaded.config, small_batch))
    rig.compare(replace(CASE, work=((3, 1), (0, 9), (17, 5))))
    rig.compare(replace(CASE, work=((17, 1),)))
    rig.compare(CASE)
    rig.compare(replace(CASE, work=CASE.work[:3]))
    assert rig.replays() == {8: 1, 4: 1, 1: 1}
    states = random(3, loaded.info.vocab_size // 2)[:, :64]
    assert torch.equal(fused_model(loaded).logits(states), loaded.model.logits(states))


@pytest.mark.parametrize("has_small_batch", [False, True])
@pytest.mark.parametrize("kind", [Doubled, DoubledMatrix])
@pytest.mark.parametrize("name", ["v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"])
def test_layers_of_another_kind_are_multiplied_by_themselves(
    tmp_path: Path, name: str, kind: type[Doubled], has_small_batch: bool
) -> None:
    """Alone, joined with others, and in the kernels of few rows: a pass that took the weight would not double."""
    make_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    loaded, twin = (load(tmp_path, "float32", None, CPU) for _ in range(2))
    assert isinstance(loaded.model, CausalLM) and isinstance(twin.model, CausalLM)
    assert isinstance(loaded.config, DecoderConfig)
    layers = replace_layers(loaded.model, kind, name)
    double_weights(twin.model, name)
    model = FusedDecoder(
        loaded.model, loaded.config, SmallBatch(CPU, [torch.float32] if has_small_batch else [])
    )
    found = []
    for computes in (model, twin.model):
        forward = PlainForward(computes, create_backend("torch"), CASE.block_size, CPU)
        with torch.inference_mode():
            states = forward.forward(profile_inputs([1, 1, 3]), None)
            found.append((states, forward.logits(states)))
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)
    if kind is Doubled:
        assert [layer.num_calls for layer in layers] == [1] * len(layers) and layers


class EqualRanks:
    """A RankGroup of ranks that all compute the same."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        return part.mul_(self.size)

    def highest(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def gather_columns(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        raise AssertionError("logits of a rank are its own columns")

    def share(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def check_dtype(self, dtype: torch.dtype) -> None:
        pass

    def close(self) -> None:
        pass


class LoggedSmallBatch(SmallBatch):
    """Logs the sizes of each product that it multiplies."""

    def __init__(self) -> None:
        super().__init__(CPU, [torch.float32])
        self.log: list[tuple[int, ...]] = []

    def multiply(self, product: Product, *arguments: Any, **options: Any) -> torch.Tensor:
        self.log.append(tuple(product.weight.shape))
        return super().multiply(product, *arguments, **options)


@pytest.mark.parametrize(("num_tokens", "has_sums"), [(1, True), (5, True), (17, False)])
@pytest.mark.parametrize("family", DECODERS)
def test_a_rank_multiplies_few_rows_by_the_same_kernels(
    tmp_path: Path, family: str, num_tokens: int, has_sums: bool
) -> None:
    """Its part of o, down and the head too, before what the ranks exchange; from 17 rows on only where it is faster."""
    make_checkpoint(tmp_path, family, **DECODERS[family])
    group = CountedGroup(EqualRanks(2))
    loaded = load(tmp_path, "float32", None, CPU, group)
    assert isinstance(loaded.model, CausalLM)
    assert isinstance(loaded.config, DecoderConfig)
    small_batch = LoggedSmallBatch()
    model = FusedDecoder(loaded.model, loaded.config, small_batch)
    inputs = profile_inputs([1] * num_tokens)
    found = []
    for computes in (loaded.model, model):
        group.clear()
        forward = PlainForward(computes, create_backend("torch"), CASE.block_size, CPU)
        with torch.inference_mode():
            states = forward.forward(inputs, None)
            found.append((states, forward.logits(states)))
        assert group.num_calls == {"sum": 2 * loaded.config.num_layers + 1}
    for own, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-4)
    o, gate_up, down = (64, 32), (96, 64), (64, 48)
    head = (len(found[0][1][0]), 64)
    sums = [o, down] if has_sums else []
    assert [each for each in small_batch.log if each in (o, down)] == sums * loaded.config.num_layers
    assert small_batch.log[-1] == head and gate_up in small_batch.log


@pytest.mark.parametrize("family", DECODERS)
def test_steps_in_pieces_equal_its_modules(tmp_path: Path, family: str) -> None:
    """One kernel stores KV at the slots of the step, and columns without a token store nothing."""
    make_checkpoint(tmp_path, family, **DECODERS[family])
    loaded = load(tmp_path, "float32", None, CPU)
    plain = PlainForward(loaded.model, create_backend("torch"), CASE.block_size, CPU)
    recorder = RerunRecorder()
    own = PlainForward(fused_model(loaded), create_backend("triton"), CASE.block_size, CPU)
    pieces = PiecewiseGraphs(own, recorder, [16, 32])
    pools = [torch.zeros(NUM_BLOCKS, *CASE.pool(CASE.inputs()).shape[1:]) for _ in range(2)]
    pieces.capture(list(pools[1].unbind(1)))
    assert not pools[1].any()
    for work in (((3, 1), (0, 9), (17, 5)), ((0, 16), (30, 1)), ((5, 2), (9, 1))):
        case = replace(CASE, work=work)
        inputs = case.inputs(MAX_LEN)
        for pool in pools:
            pool[: case.num_blocks] = case.pool(inputs)
        with torch.inference_mode():
            expected = plain.forward(inputs, list(pools[0].unbind(1)))
            states = pieces.forward(inputs)
        assert states is not None
        torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(*pools, atol=1e-5, rtol=1e-4, equal_nan=True)
    assert [each.num_replays for each in recorder.pieces] == [1, 2]


def test_weights_are_stored_once_and_used_by_both(tmp_path: Path) -> None:
    """Weights that are multiplied together are one matrix, of which the modules' weights are views; answers are equal."""
    make_checkpoint(tmp_path, "qwen2")
    loaded = load(tmp_path, "float32", None, CPU)
    assert isinstance(loaded.model, CausalLM)
    plain = PlainForward(loaded.model, create_backend("torch"), 16, CPU)
    inputs = profile_inputs([5, 1, 9])
    with torch.inference_mode():
        before = plain.forward(inputs, None)
        joined = fused_model(loaded)
        assert torch.equal(plain.forward(inputs, None), before)
        by_fused = PlainForward(joined, create_backend("torch"), 16, CPU).forward(inputs, None)
    torch.testing.assert_close(by_fused, before, atol=1e-5, rtol=1e-4)
    for layer in loaded.model.model.layers:
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        for group in (
            [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
            [attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias],
            [mlp.gate_proj.weight, mlp.up_proj.weight],
        ):
            assert len({part.untyped_storage().data_ptr() for part in group}) == 1
            assert group[0].untyped_storage().nbytes() == sum(part.nbytes for part in group)


def test_a_watch_is_called_for_every_layer(tmp_path: Path) -> None:
    """The watch is called when the layer's KV is written."""
    make_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    loaded = load(tmp_path, "float32", None, CPU)
    inputs = CASE.inputs(MAX_LEN)
    pool = CASE.pool(inputs)
    unwritten = [int(layer.isnan().sum()) for layer in pool.unbind(1)]
    layers = []

    class Watch:
        def on_stored(self, num_layers: int) -> None:
            is_written = [
                int(layer.isnan().sum()) < count
                for layer, count in zip(pool.unbind(1), unwritten, strict=True)
            ]
            layers.append((num_layers, is_written))

        def on_computed(self) -> None:
            raise AssertionError("the runner calls this, not the model")

    with torch.inference_mode():
        plain = PlainForward(fused_model(loaded), create_backend("triton"), CASE.block_size, CPU)
        plain.forward(inputs, list(pool.unbind(1)), Watch())
    assert layers == [(1, [True, False, False]), (2, [True, True, False]), (3, [True] * 3)]


def test_steps_that_reserve_memory_run_every_kind_of_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need the null block only, and compile the kernels that a first request would otherwise wait for."""
    make_checkpoint(tmp_path, "llama")
    loaded = load(tmp_path, "float32", None, CPU)
    plain = PlainForward(fused_model(loaded), create_backend("triton"), CASE.block_size, CPU)
    launched: list[tuple[str, int]] = []
    splits = PagedAttention.attend_splits
    tiles = PagedAttention.attend_tiles

    def attend_splits(self: PagedAttention, *arguments: Any) -> None:
        launched.append(("splits", arguments[4].split))
        splits(self, *arguments)

    def attend_tiles(self: PagedAttention, *arguments: Any) -> None:
        launched.append(("tiles", 0))
        tiles(self, *arguments)

    monkeypatch.setattr(PagedAttention, "attend_splits", attend_splits)
    monkeypatch.setattr(PagedAttention, "attend_tiles", attend_tiles)
    layers = null_layers(loaded, CASE.block_size, CPU)
    with torch.inference_mode():
        for inputs in reserving_steps(CASE.block_size):
            assert plain.forward(inputs, layers).isfinite().all()
    assert set(launched) == {("tiles", 0), ("splits", DECODE_SPLIT), ("splits", CHUNK_SPLIT)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [24, 64, 896, 5120])
def test_norms(size: int, dtype: torch.dtype) -> None:
    check_norm(size, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("sizes", HEADS)
def test_heads_are_normalized_and_rotated(
    sizes: tuple[int, int, int], has_norms: bool, dtype: torch.dtype
) -> None:
    check_turn(sizes, dtype, CPU, has_norms=has_norms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [3, 96, 1024, 4864])
def test_gates(size: int, dtype: torch.dtype) -> None:
    check_gate(size, dtype, CPU)
