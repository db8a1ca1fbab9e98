"""Captured decode steps without a GPU, for tests: a recorder that reruns a step, a backend with static steps, a device."""

from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.backend import LayerShape, Slots, StoreKV
from engine.attention.pages import NO_SLOT, num_cleared_behind
from engine.attention.torch_backend import TorchBackend
from engine.compute.best_tokens import TorchBestTokens, best_of_ranks
from engine.compute.forward_graphs import GraphedForward, capture_sizes
from engine.compute.forward_plain import PlainForward
from engine.compute.inputs import PreparedInputs
from engine.compute.piecewise import piece_sizes
from engine.compute.recording import Cut
from engine.compute.staging import padded
from engine.connector import LayerWatch
from engine.models.loading import LoadedModel
from engine.settings import EngineSettings


class Rerun:
    """A recording that runs the step again on the current content of its tensors and writes into the same output."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run = run
        self.output = run().clone()
        self.num_replays = 0

    def replay(self) -> None:
        """See Recording."""
        self.output.copy_(self._run())
        self.num_replays += 1


class RerunPieces:
    """A recording in pieces that runs all of them again, with what is between them at each cut."""

    def __init__(self, run: Callable[[Cut], Tensor]) -> None:
        self._run = run
        self.output = run(lambda: None).clone()
        self.num_replays = 0

    def replay(self, between: Callable[[int], None]) -> None:
        """See PieceRecording."""
        numbers = count()
        self.output.copy_(self._run(lambda: between(next(numbers))))
        self.num_replays += 1


class RerunRecorder:
    """A Recorder that keeps its recordings in the order of capture. pieces: those in pieces."""

    def __init__(self) -> None:
        self.recordings: list[Rerun] = []
        self.pieces: list[RerunPieces] = []

    def record(self, run: Callable[[], Tensor]) -> Rerun:
        """See Recorder."""
        self.recordings.append(Rerun(run))
        return self.recordings[-1]

    def record_pieces(self, run: Callable[[Cut], Tensor]) -> RerunPieces:
        """See Recorder."""
        self.pieces.append(RerunPieces(run))
        return self.pieces[-1]


class StaticTorchBackend(TorchBackend):
    """Plain torch with static decode steps. Each reads the whole block table, which is slow."""

    def plan_static(
        self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> "StaticTorchDecode":
        """See AttentionBackend."""
        return StaticTorchDecode(num_reqs, max_blocks, block_size, device)

    def static_store(self) -> StoreKV:
        """See AttentionBackend."""
        return store_static


def store_static(key: Tensor, value: Tensor, cache: Tensor, slots: Slots) -> None:
    """Store KV, as StoreKV, by operations that are the same for all slots: a token without one stores what is there."""
    num_blocks, _, num_heads, block_size, _ = cache.shape
    places = slots.places.long()
    distances = torch.arange(1, block_size + 1, device=cache.device)
    is_cleared = torch.zeros(num_blocks * block_size + 1, dtype=torch.bool, device=cache.device)
    is_behind = distances <= slots.num_cleared[:, None]
    is_cleared[torch.where(is_behind, places[:, None] + distances, num_blocks * block_size)] = True
    cache.masked_fill_(is_cleared[:-1].view(num_blocks, 1, 1, block_size, 1), 0)
    first = places.clamp(0)[:, None]
    where = (first // block_size, torch.arange(num_heads, device=cache.device)[None], first % block_size)
    for part, states in enumerate((key, value)):
        pool = cache[:, part]
        pool.index_put_(where, torch.where((places >= 0)[:, None, None], states, pool[where]))


class StaticTorchDecode:
    """See StaticDecode."""

    slots: Slots | None = None

    def __init__(self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._slots = Slots(*torch.zeros(2, num_reqs, dtype=torch.int32, device=device))
        self._slots.places.fill_(NO_SLOT)
        self._seq_lens = torch.ones(num_reqs, dtype=torch.int64, device=device)
        self._tables = torch.zeros(num_reqs, max_blocks, dtype=torch.int64, device=device)

    def refill(self, inputs: PreparedInputs) -> bool:
        """See StaticDecode."""
        num_rows = len(self._seq_lens)
        self._slots.places.copy_(torch.from_numpy(padded(inputs.slot_mapping, num_rows, NO_SLOT)))
        cleared = num_cleared_behind(inputs, self._block_size)
        self._slots.num_cleared.copy_(torch.from_numpy(padded(cleared, num_rows)))
        self._seq_lens.copy_(torch.from_numpy(padded(inputs.seq_lens, num_rows, 1)))
        self._tables.zero_()
        num_reqs, num_used = inputs.block_table.shape
        self._tables[:num_reqs, :num_used] = torch.from_numpy(inputs.block_table)
        return True

    def store(self, key: Tensor, value: Tensor, cache: Tensor) -> None:
        """See AttentionStep."""
        store_static(key, value, cache, self._slots)

    def attend(
        self,
        shape: LayerShape,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: Tensor | None,
    ) -> Tensor:
        """See AttentionStep. Slots without a token may hold NaN and are not read."""
        assert cache is not None
        assert shape.softcap is None
        first_slots = torch.arange(self._tables.shape[1], device=cache.device) * self._block_size
        tables = torch.where(first_slots < self._seq_lens[:, None], self._tables, 0)
        keys, values = cache[tables].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        positions = torch.arange(keys.shape[2], device=cache.device)
        is_seen = positions < self._seq_lens[:, None]
        if shape.sliding_window is not None:
            is_seen &= positions >= self._seq_lens[:, None] - shape.sliding_window
        mixed = scaled_dot_product_attention(
            query[:, :, None],
            keys,
            values,
            attn_mask=is_seen[:, None, None],
            scale=shape.scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        return mixed[:, :, 0]


class FakeDeviceForward(PlainForward):
    """Computes a pass on the host when it begins, as a device does whose passes run ahead. fed: whether each began so."""

    def __init__(self, loaded: LoadedModel, settings: EngineSettings, device: torch.device) -> None:
        super().__init__(loaded.model, StaticTorchBackend(), settings.block_size, device)
        self.runs_ahead = True
        self.fed: list[bool] = []

    def forward(
        self, inputs: PreparedInputs, caches: Sequence[Tensor] | None, watch: LayerWatch | None = None
    ) -> Tensor:
        """See PlainForward. The ids of tokens that are fed are unknown on the host."""
        self.fed.append(inputs.fed is not None)
        if inputs.fed is not None:
            inputs.input_ids.fill(-1)
        return super().forward(inputs, caches, watch)


class FakeDeviceGraphs(GraphedForward):
    """Graphs on that device: each replay overwrites what the one before has computed. fed: see FakeDeviceForward."""

    has_pieces = False

    def __init__(self, loaded: LoadedModel, settings: EngineSettings, device: torch.device) -> None:
        plain = FakeDeviceForward(loaded, settings, device)
        self.recorder = RerunRecorder()
        super().__init__(
            plain,
            self.recorder,
            sizes=capture_sizes(settings.max_num_seqs),
            max_model_len=loaded.info.max_model_len,
            piece_sizes=piece_sizes(settings.max_num_batched_tokens) if self.has_pieces else (),
            find_best=best_of_ranks(loaded.group, loaded.info.vocab_size, TorchBestTokens()),
        )
        self.fed: list[bool] = []

    def forward(
        self, inputs: PreparedInputs, caches: Sequence[Tensor] | None, watch: LayerWatch | None = None
    ) -> Tensor:
        """See GraphedForward."""
        self.fed.append(inputs.fed is not None)
        return super().forward(inputs, caches, watch)


class FakeDevicePieces(FakeDeviceGraphs):
    """Graphs on that device, those of steps with chunks in pieces."""

    has_pieces = True
