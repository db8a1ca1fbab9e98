"""Recurrent layers of transformers (Mamba, gated delta nets, short convolutions) over states that the engine keeps.

Such a layer reads and replaces states by the interface of transformers' caches (``get_conv_state``,
``update_recurrent_state``, ...). It would mix the texts of a packed batch, so it is run once for each request, over a view
of that request's slot. Requests that continue by one token each are run together, as a batch of texts: the weights are
read once. At position 0 there is no state for it, as at the start of a text: what is in the slot is never read.

The layers of Mamba 1 do not pass a state that exists to their scan of several tokens. They compute one token at a time.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from contract.state_layout import NO_SLOT, StateLayout, StatePart

CONV = "conv"
RECURRENT_STATE = "recurrent"
_UPDATES = ("update_conv_state(", "update_recurrent_state(")
_CACHES = ("cache_params", "past_key_values")
_PASSES_STATE = "initial_state"
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

StateKey = tuple[int, str, int]
"""Layer, name and index of a state."""


def key_of(part: StatePart) -> StateKey:
    """Return the key of a state."""
    return part.layer, part.name, part.index


@dataclass(frozen=True)
class StateStep:
    """The requests of one step: of each, its slot (0: none, its states are dropped), and its tokens.

    starts: computed tokens before the step. counts: tokens of the step, in the order of the batch. states: of all slots,
    ``[num_slots, *shape]`` each, slot 1 first; None: there are no slots, and all states are dropped. drafted: the places of
    the requests whose tokens behind the first one are drafts.
    """

    slots: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    states: Mapping[StateKey, Tensor] | None
    drafted: Sequence[int] = ()


class _View:
    """The states of one request, in transformers' interface. is_new: nothing of its text has been computed."""

    def __init__(self, find: Callable[[StateKey], Tensor], is_new: bool) -> None:
        self._find = find
        self._is_new = is_new
        self._is_known: set[tuple[int, int]] = set()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the inputs before this step, which the layer may change in place; None at the start of a text."""
        return self._get(CONV, layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """See ``get_conv_state``."""
        return self._get(RECURRENT_STATE, layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int, state_idx: int | None = 0) -> bool:
        """Return whether the text has begun."""
        return not self._is_new or (layer_idx, state_idx or 0) in self._is_known

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: nothing is undone."""
        return False

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Keep the last inputs; return them all, behind those before."""
        state = self._find((layer_idx, CONV, state_idx))
        size = state.shape[-1]
        if self.has_previous_state(layer_idx, state_idx):
            whole = torch.cat([state, conv_states], dim=-1)
        else:
            self._is_known.add((layer_idx, state_idx))
            whole = nn.functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        state.copy_(whole[..., -size:])
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Keep the state."""
        state = self._find((layer_idx, RECURRENT_STATE, state_idx))
        self._is_known.add((layer_idx, state_idx))
        state.copy_(recurrent_states)
        return state

    def _get(self, name: str, layer: int, index: int) -> Tensor | None:
        return self._find((layer, name, index)) if self.has_previous_state(layer, index) else None


class _Recording(_View):
    """Records the shapes and dtypes of states while a new text is computed."""

    def __init__(self) -> None:
        super().__init__(self._missing, is_new=True)
        self.found: dict[StateKey, Tensor] = {}

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **others: object
    ) -> Tensor:
        """Make a state of the size that transformers' cache would give it."""
        size: Any = others.get("conv_kernel_size") or conv_states.shape[-1]
        self.found[layer_idx, CONV, state_idx] = conv_states.new_zeros(*conv_states.shape[:-1], size)
        return super().update_conv_state(conv_states, layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Make a state of this shape."""
        self.found[layer_idx, RECURRENT_STATE, state_idx] = torch.zeros_like(recurrent_states)
        return recurrent_states

    def _missing(self, key: StateKey) -> Tensor:
        return self.found[key]


class _Together:
    """The requests of a step that continue by one token each, which a layer computes at once, as a batch of texts.

    places: theirs, by slot. tokens: of the packed batch, in that order.
    """

    def __init__(
        self, step: StateStep, places: Sequence[int], slots: Sequence[int], states: Mapping[StateKey, Tensor]
    ) -> None:
        self.places = places
        firsts = [0, *accumulate(step.counts)]
        device = next(iter(states.values())).device
        self.tokens = torch.tensor([firsts[place] for place in places], device=device)
        self._states = states
        # Those in a row need no copies.
        self._row = slice(slots[0] - 1, slots[-1]) if slots[-1] - slots[0] == len(slots) - 1 else None
        self._indices = torch.tensor(slots, device=device) - 1
        self._found: dict[StateKey, Tensor] = {}

    @classmethod
    def of(cls, step: StateStep) -> "_Together | None":
        """Return the requests of a step that are computed together; None for less than two."""
        of_step = enumerate(zip(step.slots, step.starts, step.counts, strict=True))
        found = sorted(
            (slot, place)
            for place, (slot, start, count) in of_step
            if slot != NO_SLOT and start and count == 1
        )
        if step.states is None or len(found) < 2:
            return None
        return cls(step, [place for _, place in found], [slot for slot, _ in found], step.states)

    def find(self, key: StateKey) -> Tensor:
        """Return the states ``[num_requests, *shape]`` of all these requests, which ``write_back`` writes."""
        if self._row is not None:
            return self._states[key][self._row]
        if key not in self._found:
            self._found[key] = self._states[key].index_select(0, self._indices)
        return self._found[key]

    def write_back(self) -> None:
        """Write what one layer has changed into the slots."""
        for key, state in self._found.items():
            self._states[key].index_copy_(0, self._indices, state)
        self._found.clear()


_Compute = Callable[[Mapping[str, Any], _View, range], list[Any]]
"""Arguments of a layer, the states of a request and a range of its tokens → outputs."""


class RecurrentLayers:
    """All recurrent layers of one model. Replaces their ``forward``, and owns the running step.

    layout: their states; it is known after ``survey``, None of a model that has none.
    """

    def __init__(self, whole: nn.Module) -> None:
        self.layout: StateLayout | None = None
        self._recording: _Recording | None = None
        self._step: StateStep | None = None
        self._together: _Together | None = None
        self._examples: dict[StateKey, Tensor] = {}
        self.layers: set[int] = set()
        self._modules: list[Any] = []
        # Of the last step: by the place of a request with drafts, what each layer computed of it.
        self._drafted: dict[int, list[tuple[_Compute, dict[str, Any]]]] = {}
        for module in whole.modules():
            if _is_recurrent(module):
                layer: Any = module
                self.layers.add(layer.layer_idx)
                layer.forward = self._wrapped(module)
                self._modules.append(layer)

    @contextmanager
    def survey(self) -> Iterator[None]:
        """Find the states of each layer by the new text that is computed in this block."""
        self._recording = recording = _Recording()
        try:
            yield
        finally:
            self._recording = None
        self._examples = recording.found
        parts = [
            StatePart(
                layer=layer,
                name=name,
                index=index,
                shape=tuple(state.shape[1:]),
                dtype=_DTYPE_NAMES[state.dtype],
            )
            for (layer, name, index), state in sorted(recording.found.items())
        ]
        self.layout = StateLayout(tuple(parts)) if parts else None

    def survey_alone(self, hidden_states: Tensor) -> None:
        """Find the states by the recurrent layers alone, of a new text. hidden_states: ``[1, num_tokens, hidden_size]``."""
        with self.survey():
            for module in self._modules:
                module.forward(hidden_states=hidden_states, **{_cache_of(module): None})

    @contextmanager
    def during(self, step: StateStep) -> Iterator[None]:
        """Run the layers by ``step`` until the end of the block."""
        self._step = step
        self._together = _Together.of(step)
        self._drafted = {place: [] for place in step.drafted}
        try:
            yield
        finally:
            self._step = None

    def absorb_again(self, step: StateStep, place: int, num_tokens: int) -> None:
        """Compute the states behind the first tokens of a request with drafts again, from those before ``step``.

        The rest of the model is not computed: up to its first wrong draft, what a layer got was right. step: the last one.
        """
        find = self._finder(step.states, step.slots[place])
        for compute, given in self._drafted[place]:
            compute(given, _View(find, is_new=False), range(num_tokens))

    def _wrapped(self, module: nn.Module) -> Callable[..., Any]:
        original = module.forward
        signature = inspect.signature(original)
        cache = _cache_of(module)
        is_by_token = computes_by_token(module)

        def compute(given: Mapping[str, Any], view: _View, tokens: range) -> list[Any]:
            size = 1 if is_by_token else len(tokens)
            return [
                original(**_part_of(given, slice(at, min(at + size, tokens.stop))), **{cache: view})
                for at in range(tokens.start, tokens.stop, size)
            ]

        def forward(*arguments: Any, **named: Any) -> Any:
            step = self._step
            recording = self._recording
            if step is None and recording is None:  # transformers alone computes
                return original(*arguments, **named)
            given = signature.bind(*arguments, **named).arguments
            if step is None:
                return original(**_part_of(given, slice(None)), **{cache: recording})
            outputs: dict[int, Any] = {}
            if (together := self._together) is not None:
                part = _part_of(given, slice(None))
                batch = {
                    name: each.index_select(1, together.tokens).transpose(0, 1) for name, each in part.items()
                }
                whole = original(**batch, **{cache: _View(together.find, is_new=False)})
                together.write_back()
                outputs = {place: _text_of(whole, row) for row, place in enumerate(together.places)}
            first = 0
            for place, (slot, computed, count) in enumerate(
                zip(step.slots, step.starts, step.counts, strict=True)
            ):
                if place in outputs:
                    first += count
                    continue
                view = _View(self._finder(step.states, slot), is_new=computed == 0)
                if place in self._drafted:  # copies: the layers behind this one may change what it got
                    own = _part_of(given, slice(first, first + count))
                    self._drafted[place].append((compute, {name: each.clone() for name, each in own.items()}))
                outputs[place] = _joined(compute(given, view, range(first, first + count)))
                first += count
            return _joined([outputs[place] for place in range(len(step.slots))])

        return forward

    def _finder(self, states: Mapping[StateKey, Tensor] | None, slot: int) -> Callable[[StateKey], Tensor]:
        """Return what finds a state ``[1, *shape]`` of a slot; without one it is made, and dropped."""
        if states is not None and slot != NO_SLOT:
            return lambda key: states[key][slot - 1 : slot]
        made: dict[StateKey, Tensor] = {}

        def find(key: StateKey) -> Tensor:
            if key not in made:
                made[key] = torch.zeros_like(self._examples[key])
            return made[key]

        return find


def _cache_of(module: nn.Module) -> str:
    """Return the name by which a layer's forward pass gets its states."""
    parameters = inspect.signature(type(module).forward).parameters
    return next(name for name in _CACHES if name in parameters)


def _part_of(given: Mapping[str, Any], tokens: slice) -> dict[str, Tensor]:
    """Return the arguments for some tokens of a packed batch ``[1, num_tokens, ...]``, without its masks."""
    size = given["hidden_states"].shape[:2]
    return {
        name: value[:, tokens]
        for name, value in given.items()
        if isinstance(value, Tensor) and value.shape[:2] == size and not name.endswith("mask")
    }


def _text_of(whole: Any, row: int) -> Any:
    """Return the output of one text of a batch."""
    return (
        tuple([each[row : row + 1] for each in whole]) if isinstance(whole, tuple) else whole[row : row + 1]
    )


def _joined(outputs: list[Any]) -> Any:
    if isinstance(outputs[0], tuple):
        return tuple([torch.cat(each, dim=1) for each in zip(*outputs, strict=True)])
    return torch.cat(outputs, dim=1)


def _source_of(module: nn.Module) -> str:
    try:
        return inspect.getsource(type(module).forward)
    except (OSError, TypeError):  # of no file, so not of transformers
        return ""


def _is_recurrent(module: nn.Module) -> bool:
    """Return whether a layer keeps a state by the interface of transformers' caches."""
    return hasattr(module, "layer_idx") and any(update in _source_of(module) for update in _UPDATES)


def computes_by_token(module: nn.Module) -> bool:
    """Return whether a layer ignores a state that exists if it computes several tokens (Mamba 1)."""
    source = _source_of(module)
    return _UPDATES[1] in source and _PASSES_STATE not in source
