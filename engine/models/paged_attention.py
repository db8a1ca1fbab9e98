"""An implementation of transformers' attention interface over the paged KV cache.

A model of transformers looks its attention up by name in a registry that transformers owns. ``register`` adds two names,
once per process: under SERVING a layer attends through the running step; under ASKING the parameters of its attention are
recorded. ``attach`` stores the object that does either as the attribute ``paged_attention`` of each layer's module.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from contract.errors import InternalError
from contract.layout import JOINED, KEY_VALUE, LATENT
from engine.attention.backend import LayerShape, Steps, step_of
from engine.connector import LayerWatch
from engine.models.attention_methods import replace_methods
from engine.models.config import KVShape, ModelShape, unserved
from engine.models.latent_attention import LatentProjection, find_latent
from engine.models.recurrent_layers import RecurrentLayers
from engine.models.transformers_types import LATER, RECURRENT, TWICE

SERVING = "kvbaton"
ASKING = "kvbaton_asking"
_ATTRIBUTE = "paged_attention"
# Arguments that a layer may give beside those of ``_attend``: they change nothing of a causal forward pass.
_WITHOUT_MEANING = frozenset(
    """cache_position dropout is_causal logits_to_keep output_attentions output_hidden_states output_router_logits
    position_embeddings position_ids use_cache""".split()
)
_FAR = 2**20

MaskFunction = Callable[..., Any]
"""A function of tensors: batch, head, query position, key position."""


@dataclass(frozen=True)
class LayerCall:
    """The inputs of one layer's attention; query, key and value are ``[num_tokens, heads, head_dim]``.

    latent: what key and value come from, which is cached in their place; None: they are cached. states: the key as the model
    gave it, by which layers that share it are known.
    """

    layer: int
    shape: LayerShape
    query: Tensor
    key: Tensor
    value: Tensor
    mask: object
    others: dict[str, Any]
    latent: LatentProjection | None = None
    states: Tensor | None = None

    @property
    def is_joined(self) -> bool:
        """True if key and value differ in width, so that they are cached as one row."""
        return self.latent is None and self.key.shape[-1] != self.value.shape[-1]


def register() -> None:
    """Register both names with transformers; a second call changes nothing."""
    for name in (SERVING, ASKING):
        AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(ASKING, lambda *_, mask_function, **__: AskedMask(mask_function))


def attach(model: nn.Module, answer: "PagedAttention | Survey") -> None:
    """Make every layer of ``model`` use ``answer`` from now on."""
    replace_methods(model, _attend, (SERVING, ASKING))
    module: Any
    for name, module in model.named_modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _ATTRIBUTE, answer)
            # Layers that share their weights (Zamba 2) are built without their numbers.
            if module.layer_idx == -1 and (number := re.search(r"\.(\d+)\.", name)):
                module.layer_idx = int(number[1])


@dataclass(frozen=True)
class Temperature:
    """The growth of a layer's queries with their position (Llama 4): 1 + scale × log(1 + (position + 1) // floor)."""

    scale: float
    floor: float

    def scaled(self, query: Tensor, positions: Tensor) -> Tensor:
        """Return ``query`` ``[num_tokens, heads, head_dim]`` of tokens at ``positions`` ``[num_tokens]``, in its dtype."""
        growth = torch.log1p(torch.floor((positions.float() + 1.0) / self.floor)) * self.scale + 1.0
        return (query * growth[:, None, None]).to(query.dtype)


def remove_temperatures(model: nn.Module) -> dict[int, Temperature]:
    """Return the temperature of each layer that has one, by layer, and remove it from ``model``.

    The model counts the tokens of a batch as the positions of one text.
    """
    found = {}
    module: Any
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            found[module.layer_idx] = Temperature(module.attn_scale, module.floor_scale)
            module.attn_temperature_tuning = False
    return found


@dataclass(frozen=True)
class _Running:
    step: Steps
    caches: Sequence[Tensor] | None
    watch: LayerWatch | None
    positions: Tensor


class PagedAttention:
    """Attends in the running step. Owns the step, the caches and the watch meanwhile.

    reaches: fields of LayerShape, of the layers of which only the mask has them. temperatures: by layer. places: of each
    layer that attends, in the cache; several layers may share one, which the first of them stores.
    """

    def __init__(
        self,
        reaches: Mapping[int, dict[str, Any]],
        temperatures: Mapping[int, Temperature],
        places: Mapping[int, int],
    ) -> None:
        self._places = places
        self._storing = frozenset({place: layer for layer, place in reversed(list(places.items()))}.values())
        self._reaches = reaches
        self._temperatures = temperatures
        self._running: _Running | None = None

    @contextmanager
    def during(
        self,
        step: Steps,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None,
        positions: Tensor,
    ) -> Iterator[None]:
        """Attend by ``step`` until the end of the block. positions ``[num_tokens]``: of the step's tokens."""
        self._running = _Running(step, caches, watch, positions)
        try:
            yield
        finally:
            self._running = None

    def attend(self, call: LayerCall) -> Tensor:
        """Store the tokens' KV, notify the watch, and attend over the tokens that each may see."""
        if self._running is None:
            raise InternalError("a layer attends while no step runs")
        place = self._places[call.layer]
        step = step_of(self._running.step, place)
        caches = self._running.caches
        cache = None if caches is None else caches[place]
        query = call.query
        key = call.key
        value = call.value
        if (latent := call.latent) is not None:
            query = latent.absorb(query)
            key = value = latent.rows(key)
        elif call.is_joined:
            # The zeros meet the value in the score.
            query = pad(query, (0, value.shape[-1]))
            key = value = torch.cat((key, value), dim=-1)
        if call.layer in self._storing:
            if cache is not None:
                step.store(key, value, cache)
            if self._running.watch is not None:
                self._running.watch.on_stored(place + 1)
        if (temperature := self._temperatures.get(call.layer)) is not None:
            query = temperature.scaled(query, self._running.positions)
        shape = call.shape
        if (reach := self._reaches.get(call.layer)) is not None:
            shape = replace(shape, **reach)
        mixed = step.attend(shape, query, key, value, cache)
        if latent is not None:
            return latent.expand(mixed)
        return mixed[..., -call.value.shape[-1] :]


class Survey:
    """Records the attention of every layer; raises SettingError for one that the paged cache cannot compute.

    chunk_size, window: those of the layers that have one, as the configuration gives them; None without any. reaches: see
    PagedAttention.
    """

    def __init__(self, architecture: str, chunk_size: int | None = None, window: int | None = None) -> None:
        self._architecture = architecture
        self._chunk_size = chunk_size
        self._window = window
        self._calls: list[LayerCall] = []
        self.reaches: dict[int, dict[str, Any]] = {}
        self.places: dict[int, int] = {}

    def attend(self, call: LayerCall) -> Tensor:
        """Record the call and return what has the shape of its result."""
        reason = _why_unserved(call) or _why_masked_otherwise(call.mask, call.shape.sliding_window)
        if reason and call.shape.sliding_window is None:
            if self._chunk_size is not None and _is_chunked(call.mask, self._chunk_size):
                self.reaches[call.layer] = {"chunk_size": self._chunk_size}
            elif self._window is not None and not _why_masked_otherwise(call.mask, self._window):
                self.reaches[call.layer] = {"sliding_window": self._window}
            if call.layer in self.reaches:
                reason = _why_unserved(call)
        if reason:
            raise unserved(self._architecture, reason)
        self._calls.append(call)
        return call.query if call.value.shape[-1] == call.query.shape[-1] else _values_of_heads(call)

    @property
    def special_attention(self) -> str | None:
        """See LanguageModel."""
        if any(call.shape.sinks is not None for call in self._calls):
            return "attention sinks"
        if any(call.is_joined for call in self._calls):
            return "keys and values of different widths"
        if len({_cached_shape(call) for call in self._calls}) > 1:
            return "layers whose KV differs in shape"
        return "attention in chunks" if any("chunk_size" in each for each in self.reaches.values()) else None

    @property
    def layers(self) -> list[int]:
        """The layers that attend, in their order."""
        return [call.layer for call in self._calls]

    def result(
        self, num_layers: int, vocab_size: int, num_positions: int, recurrent: RecurrentLayers | None = None
    ) -> ModelShape:
        """Return the model's shape. num_layers: from its configuration."""
        layers = self.layers
        states = None if recurrent is None else recurrent.layout
        # Beside recurrent layers there may be layers that keep nothing.
        is_whole = states is not None or set(layers) == set(range(num_layers))
        if len(set(layers)) < len(layers) or not is_whole:
            reason = TWICE if len(set(layers)) < len(layers) else RECURRENT
            raise unserved(
                self._architecture, f"{reason} (its {num_layers} layers attend {len(layers)} times)"
            )
        if not self._calls:
            return ModelShape(vocab_size, 0, 1, 1, num_positions, sliding_windows=(), states=states)
        storing: list[LayerCall] = []
        for call in self._calls:
            place = next((at for at, other in enumerate(storing) if other.states is call.states), None)
            if place is None:
                place = len(storing)
                storing.append(call)
            elif self._window_of(call) != self._window_of(storing[place]):
                raise unserved(
                    self._architecture,
                    "layers that share their KV and differ in their windows are not served",
                )
            self.places[call.layer] = place
        shapes = tuple(map(_cached_shape, storing))
        return ModelShape(
            vocab_size,
            len(storing),
            shapes[0].num_kv_heads,
            shapes[0].head_dim,
            num_positions,
            kv_parts=shapes[0].parts,
            sliding_windows=tuple(map(self._window_of, storing)),
            states=states,
            kv_shapes=shapes if len(set(shapes)) > 1 else (),
        )

    def _window_of(self, call: LayerCall) -> int | None:
        """Return how many tokens a token of the layer sees at most: a chunk is no longer than a window of its size."""
        reach = self.reaches.get(call.layer, {})
        window: int | None = reach.get("sliding_window") or reach.get("chunk_size")
        return call.shape.sliding_window or window


def _cached_shape(call: LayerCall) -> KVShape:
    """Return the shape of what the cache has of a token."""
    if call.latent is not None:
        return KVShape(LATENT, 1, call.latent.row_size)
    num_kv_heads, head_dim = call.key.shape[1:]
    if call.is_joined:
        return KVShape(JOINED, num_kv_heads, head_dim + call.value.shape[-1])
    return KVShape(KEY_VALUE, num_kv_heads, head_dim)


def _values_of_heads(call: LayerCall) -> Tensor:
    """Return the values, repeated for all heads of a KV head: they have the shape of a result."""
    return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)


@dataclass(frozen=True)
class AskedMask:
    """The mask of a model, as a function of (batch, head, query position, key position)."""

    function: MaskFunction

    def __getitem__(self, index: tuple[slice, ...]) -> "AskedMask":
        """Return the mask itself: Gemma 4 reads a part that is all of it. Raises IndexError for a smaller part."""
        if any(part.start or part.stop is not None for part in index):
            raise IndexError(f"a part of a mask, {index}")
        return self

    def sees(self, query: int, key: int) -> bool:
        """Return whether the token at ``query`` sees the one at ``key``."""
        nought = torch.tensor(0)  # batch and head: no mask that is served depends on them
        return bool(self.function(nought, nought, torch.tensor(query), torch.tensor(key)))


def _why_unserved(call: LayerCall) -> str | None:
    if unknown := sorted(set(call.others) - _WITHOUT_MEANING):
        return f"attention that takes {unknown[0]!r} is not served"
    if call.others.get("is_causal") is False:
        return LATER
    if call.query.shape[1] % call.key.shape[1]:
        return f"its {call.query.shape[1]} heads are no multiple of its {call.key.shape[1]} KV heads"
    return None


def _is_chunked(mask: object, size: int) -> bool:
    """Return whether a token sees all earlier ones of its own chunk of ``size`` positions, and no others."""
    if not isinstance(mask, AskedMask):
        return False
    start = _FAR // size * size
    ends = (start + size // 2, start + size - 1)
    return all(
        mask.sees(end, start) and mask.sees(end, end) and not mask.sees(end, start - 1) for end in ends
    ) and not mask.sees(start, start + 1)


def _why_masked_otherwise(mask: object, window: int | None) -> str | None:
    """Return why ``mask`` is not the causal one with ``window``, else None; only the window reaches the backend."""
    if mask is None and window is None:  # transformers makes none for the plain causal one
        return None
    if not isinstance(mask, AskedMask):
        return "its mask is of its own making"
    is_causal = mask.sees(_FAR, _FAR) and not mask.sees(_FAR, _FAR + 1)
    first = 0 if window is None else _FAR - window + 1
    is_whole = mask.sees(_FAR, first) and (window is None or not mask.sees(_FAR, first - 1))
    if is_causal and is_whole:
        return None
    return f"a layer's mask is not the causal one with the window that its attention names ({window})"


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it: ``[1, heads, num_tokens, head_dim]`` in, tokens before heads out."""
    answer: PagedAttention | Survey = getattr(module, _ATTRIBUTE)
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    states = key
    query, key, value = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    given = {name: other for name, other in others.items() if other is not None}
    given.setdefault("is_causal", getattr(module, "is_causal", True))
    shape = LayerShape(scale, sliding_window, softcap, sinks=s_aux)
    call = LayerCall(layer, shape, query, key, value, attention_mask, given, find_latent(module), states)
    return answer.attend(call)[None], None
