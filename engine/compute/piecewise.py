"""Steps with chunks of prompts in pieces: everything but attention is captured, for some numbers of tokens.

Attention depends on the lengths of each request, so it runs between the pieces as in a step without graphs. Everything else
depends on the number of tokens only. A step is padded to the next size: the columns behind its tokens hold id 0, store no
KV, and attention does not read or write them; no operation of ours mixes columns, so they never reach a request.
"""

import logging
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import LayerShape, Slots, StoreKV
from engine.attention.pages import NO_SLOT, num_cleared_behind
from engine.compute.forward_plain import PlainForward
from engine.compute.inputs import PreparedInputs
from engine.compute.recording import Cut, PieceRecording, Recorder
from engine.compute.staging import copy_into, padded
from engine.connector import LayerWatch

logger = logging.getLogger(__name__)

# Numbers of tokens. Small-batch products have one kernel up to 16 rows and one up to 64, so padding does not change it.
# From about 200 rows on the number of rows costs time, so the sizes are closer there.
_SIZES = (16, 32, 64, 128, 192, 256, 384, 512)


def piece_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return the sizes, up to the first that holds ``max_num_batched_tokens``."""
    return [
        size for size, before in zip(_SIZES, (0, *_SIZES), strict=False) if before < max_num_batched_tokens
    ]


class _Between:
    """The queries and the results of attention of every layer and size, ``[most_tokens, num_heads, head_dim]``.

    They stay where they are; one pair is enough, since a layer's attention ends before the next one has its queries.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._states: Tensor | None = None

    def put(self, query: Tensor) -> Tensor:
        """Keep the queries of a layer; return where its results will be. The first call is not captured."""
        if self._states is None:
            self._states = query.new_zeros(2, self._most_tokens, *query.shape[1:])
        kept, mixed = self.first(len(query))
        kept.copy_(query)
        return mixed

    def first(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the queries and results of the first columns."""
        assert self._states is not None
        query, mixed = self._states[:, :num_tokens]
        return query, mixed


class _CutStep:
    """The attention of a run that is captured: a cut; see AttentionStep.

    attended: the shape and cache of each layer, in order.
    """

    def __init__(self, slots: Slots, store: StoreKV, between: _Between, cut: Cut) -> None:
        self.slots: Slots | None = slots
        self.attended: list[tuple[LayerShape, Tensor]] = []
        self._own_slots = slots
        self._store = store
        self._between = between
        self._cut = cut

    def store(self, key: Tensor, value: Tensor, cache: Tensor) -> None:
        """See AttentionStep."""
        self._store(key, value, cache, self._own_slots)

    def attend(
        self, shape: LayerShape, query: Tensor, key: Tensor | None, value: Tensor | None, cache: Tensor | None
    ) -> Tensor:
        """End a piece; return the results that are there when the next one begins."""
        assert cache is not None
        self.attended.append((shape, cache))
        mixed = self._between.put(query)
        self._cut()
        return mixed


class PiecewiseGraphs:
    """Captures and replays the pieces of each size; they are one more than the model has layers."""

    def __init__(self, plain: PlainForward, recorder: Recorder, sizes: Sequence[int]) -> None:
        self._plain = plain
        self._recorder = recorder
        self._sizes = sorted(sizes)
        self._between = _Between(self._sizes[-1])
        self._tokens: dict[int, Tensor] = {}
        self._recordings: dict[int, PieceRecording] = {}
        self._attended: list[tuple[LayerShape, Tensor]] = []

    def capture(self, caches: Sequence[Tensor]) -> None:
        """Capture all sizes for these caches, the largest first: the others find room in its memory.

        It is called once before the pool's size is chosen, so that the pool leaves room for graphs of every size, and once
        with the pool. A size that was captured before is given up as soon as it is captured again.
        """
        store = self._plain.backend.static_store()
        if store is None:
            return
        start = time.monotonic()
        for size in reversed(self._sizes):
            if size not in self._tokens:
                self._tokens[size] = torch.zeros(4, size, dtype=torch.int32, device=self._plain.device)
                self._tokens[size][2].fill_(NO_SLOT)
            with torch.inference_mode():
                run = partial(self._run, self._tokens[size], store, caches)
                self._recordings[size] = self._recorder.record_pieces(run)
        logger.info(
            "CUDA graphs of %d pieces for each of %d numbers of tokens up to %d: %.1f s",
            len(self._attended) + 1,
            len(self._sizes),
            self._sizes[-1],
            time.monotonic() - start,
        )

    def _run(self, tokens: Tensor, store: StoreKV, caches: Sequence[Tensor], cut: Cut) -> Tensor:
        input_ids, positions, places, num_cleared = tokens
        step = _CutStep(Slots(places, num_cleared), store, self._between, cut)
        states: Tensor = self._plain.model(input_ids, positions, step, caches)
        self._attended = step.attended
        return states

    def forward(self, inputs: PreparedInputs, watch: LayerWatch | None = None) -> Tensor | None:
        """Return the final hidden states, a tensor of their own; None if no size holds the step.

        watch: called for every layer, between the piece that writes its KV and its attention.
        """
        num_tokens = inputs.num_tokens
        size = next((size for size in self._sizes if size >= num_tokens), None)
        if size is None or size not in self._recordings:
            return None
        plain = self._plain
        step = plain.backend.plan(inputs, plain.block_size, plain.device)
        tokens = self._tokens[size]
        rows = [
            padded(inputs.input_ids, size),
            padded(inputs.positions, size),
            padded(inputs.slot_mapping, size, NO_SLOT),
            padded(num_cleared_behind(inputs, plain.block_size), size),
        ]
        copy_into([tokens], [np.stack(rows)])
        if inputs.fed is not None:
            tokens[0, :num_tokens].copy_(inputs.fed)
        query, mixed = self._between.first(num_tokens)

        def attend(layer: int) -> None:
            if watch is not None:
                watch.on_stored(layer + 1)
            shape, cache = self._attended[layer]
            step.attend(shape, query, None, None, cache, mixed)

        recording = self._recordings[size]
        recording.replay(attend)
        return recording.output[:num_tokens].clone()  # the next replay of any size may use the same memory

    def close(self) -> None:
        """Give the graphs' memory back."""
        self._recordings.clear()
        self._attended.clear()
