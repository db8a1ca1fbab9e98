"""The forward pass by torch's modules."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, AttentionStep, GroupedStep, Steps
from engine.compute.inputs import PreparedInputs
from engine.compute.profiling import reserving_steps
from engine.compute.staging import on_device
from engine.connector import LayerWatch
from engine.models.language_model import LanguageModel
from engine.sampling.sampler import Draw, Sampling, draw_by_torch


class PlainForward:
    """A model of torch's modules with an attention backend: the reference for every other implementation."""

    serves_groups = True

    def __init__(
        self,
        model: LanguageModel,
        backend: AttentionBackend,
        block_size: int,
        device: torch.device,
        draw: Draw = draw_by_torch,
    ) -> None:
        self.model = model
        self.backend = backend
        self.block_size = block_size
        self.device = device
        self.draw = draw
        self.runs_ahead = device.type == "cuda"

    def forward(
        self, inputs: PreparedInputs, caches: Sequence[Tensor] | None, watch: LayerWatch | None = None
    ) -> Tensor:
        """Return the final hidden states; on a GPU they may still be computed."""
        first = self.backend.plan(inputs, self.block_size, self.device)
        steps: Steps = first
        if inputs.others:
            others: dict[int, AttentionStep] = {}
            for tables in inputs.others:
                own = self.backend.plan(inputs.of_group(tables), self.block_size, self.device)
                others.update(dict.fromkeys(tables.layers, own))
            steps = GroupedStep(first, others)
        input_ids, positions = on_device([inputs.input_ids, inputs.positions], self.device)
        if inputs.fed is not None:
            input_ids = inputs.fed.to(torch.int32)
        recurrent = self.model.recurrent
        with nullcontext() if recurrent is None else recurrent.during(inputs.state_step):
            states: Tensor = self.model(input_ids, positions, steps, caches, watch)
        return states

    def begin(
        self,
        inputs: PreparedInputs,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
        *,
        may_be_interrupted: bool = False,
    ) -> Callable[[], Tensor]:
        """See ForwardPass. On the host the pass runs when the result is called: the caller may do other work before."""
        if not self.runs_ahead:
            return partial(self.forward, inputs, caches, watch)
        states = self.forward(inputs, caches, watch)
        return lambda: states

    def interrupt(self) -> None:
        """See ForwardPass. Do nothing: the pass runs to its end."""

    def logits(self, states: Tensor) -> Tensor:
        """See ForwardPass."""
        return self.model.logits(states)

    def best_tokens(self, logits: Tensor) -> Sampling | None:
        """See ForwardPass."""
        return None

    def reserve(self, caches: Sequence[Tensor]) -> None:
        """See ForwardPass. Some steps in the null block take the backend's workspaces; the host has none."""
        if self.device.type == "cpu":
            return
        for inputs in reserving_steps(self.block_size):
            self.forward(inputs, caches)

    def capture(self, caches: Sequence[Tensor]) -> None:
        """Do nothing: there is nothing to prepare."""

    def close(self) -> None:
        """Do nothing: there are no threads to end."""
