"""Captured decode steps without a GPU, for tests: a recorder that reruns a step, a backend with static steps, a device."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.backend import LayerShape, Slots
from engine.attention.torch_backend import TorchBackend
from engine.compute.forward_graphs import GraphedForward, capture_sizes
from engine.compute.forward_plain import PlainForward
from engine.compute.inputs import PreparedInputs
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


class RerunRecorder:
    """A Recorder that keeps its recordings in the order of capture."""

    def __init__(self) -> None:
        self.recordings: list[Rerun] = []

    def record(self, run: Callable[[], Tensor]) -> Rerun:
        """See Recorder."""
        self.recordings.append(Rerun(run))
        return self.recordings[-1]


class StaticTorchBackend(TorchBackend):
    """Plain torch with static decode steps. Each reads the whole block table, which is slow."""

    def plan_static(
        self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> "StaticTorchDecode":
        """See AttentionBackend."""
        return StaticTorchDecode(num_reqs, max_blocks, block_size, device)


class StaticTorchDecode:
    """See StaticDecode."""

    slots: Slots | None = None

    def __init__(self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._slots = torch.full((num_reqs,), -1, device=device)
        self._seq_lens = torch.ones(num_reqs, dtype=torch.int64, device=device)
        self._tables = torch.zeros(num_reqs, max_blocks, dtype=torch.int64, device=device)

    def refill(self, inputs: PreparedInputs) -> bool:
        """See StaticDecode."""
        unused = (0, len(self._slots) - inputs.num_reqs)
        self._slots.copy_(torch.from_numpy(np.pad(inputs.slot_mapping, unused, constant_values=-1)))
        self._seq_lens.copy_(torch.from_numpy(np.pad(inputs.seq_lens, unused, constant_values=1)))
        self._tables.zero_()
        num_reqs, num_used = inputs.block_table.shape
        self._tables[:num_reqs, :num_used] = torch.from_numpy(inputs.block_table)
        return True

    def store(self, key: Tensor, value: Tensor, cache: Tensor) -> None:
        """See AttentionStep."""
        for row in torch.nonzero(self._slots >= 0).flatten().tolist():
            block, offset = divmod(int(self._slots[row]), self._block_size)
            if offset == 0:
                cache[block] = 0
            cache[block, 0, :, offset] = key[row]
            cache[block, 1, :, offset] = value[row]

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

    def __init__(self, loaded: LoadedModel, settings: EngineSettings, device: torch.device) -> None:
        plain = FakeDeviceForward(loaded, settings, device)
        sizes = capture_sizes(settings.max_num_seqs)
        length = loaded.info.max_model_len
        super().__init__(plain, RerunRecorder(), sizes=sizes, max_model_len=length, group=loaded.group)
        self.fed: list[bool] = []

    def forward(
        self, inputs: PreparedInputs, caches: Sequence[Tensor] | None, watch: LayerWatch | None = None
    ) -> Tensor:
        """See GraphedForward."""
        self.fed.append(inputs.fed is not None)
        return super().forward(inputs, caches, watch)
