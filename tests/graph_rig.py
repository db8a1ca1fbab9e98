"""A model that runs twice, with and without captured decode steps, so that tests compare the results."""

import torch

from engine.attention.backend import AttentionBackend, create_backend
from engine.compute.forward_graphs import GraphedForward, capture_sizes
from engine.compute.forward_plain import PlainForward
from engine.models.language_model import LanguageModel
from engine.models.loading import LoadedModel
from tests.attention_cases import CPU, Case
from tests.fakes.engine.graphs import RerunRecorder

MAX_LEN = 96
CASE = Case(head_dim=16, block_size=4, work=((1, 1), (15, 1), (16, 1), (30, 1), (7, 1), (3, 1)))
NUM_BLOCKS = 64


class Rig:
    """A model run by plain torch, and by a backend with graphs, each with its own pool.

    model: computes the second one; None: its modules.
    """

    def __init__(
        self, loaded: LoadedModel, backend: AttentionBackend, model: LanguageModel | None = None
    ) -> None:
        self.loaded, self.recorder = loaded, RerunRecorder()
        model = model or loaded.model
        self.plain = PlainForward(loaded.model, create_backend("torch"), CASE.block_size, CPU)
        self.graphed = GraphedForward(
            PlainForward(model, backend, CASE.block_size, CPU),
            self.recorder,
            sizes=capture_sizes(6),
            max_model_len=MAX_LEN,
        )
        self.pools = [
            torch.full((NUM_BLOCKS, *CASE.pool(CASE.inputs()).shape[1:]), torch.nan) for _ in range(2)
        ]
        self.caches = [list(pool.unbind(1)) for pool in self.pools]
        self.graphed.capture(self.caches[1])

    def compare(self, case: Case) -> None:
        """Run a step of both on the same pool: the states are equal, and so are the pools afterwards."""
        inputs = case.inputs(MAX_LEN)
        for pool in self.pools:
            pool[: case.num_blocks] = case.pool(inputs)
        with torch.inference_mode():
            expected = self.plain.forward(inputs, self.caches[0])
            states = self.graphed.forward(inputs, self.caches[1])
            expected_logits = self.plain.logits(expected)
            logits = self.graphed.logits(states)
        torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-4)
        best = self.graphed.best_tokens(logits)
        assert best is None or best.read().token_ids == expected_logits.argmax(dim=-1).tolist()
        assert (best is None) == (inputs.max_query_len > 1 or inputs.num_reqs > 8)
        torch.testing.assert_close(*self.pools, atol=1e-5, rtol=1e-4, equal_nan=True)

    def replays(self) -> dict[int, int]:
        """Return the number of replays for each graph size that was replayed."""
        sizes = reversed(capture_sizes(6))
        return {
            size: recording.num_replays
            for size, recording in zip(sizes, self.recorder.recordings, strict=True)
            if recording.num_replays
        }
