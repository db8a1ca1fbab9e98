"""Decide by its configuration whether a decoder of transformers gives right answers over the paged KV cache.

Needs transformers' configurations, not torch: ``kvbaton check`` and the start of a service ask before a process is started,
and the loader asks the same functions.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from contract.errors import KvbatonError, SettingError
from contract.layout import KEY_VALUE, LATENT
from contract.model_folder import LENGTH_WITHOUT_POSITIONS
from engine.models.config import KVShape, RawConfig, context_lengths, name_angles, unserved
from engine.models.registry import ARCHITECTURES, architecture_name
from engine.models.transformers_types import (
    COMPUTES_ANGLES,
    ENCODERS,
    EXPERT_HEADS,
    LATER,
    OTHER_ATTENTION,
    REASON_OF_TYPE,
    RECURRENT,
    SPARSE,
    TRIED,
)

# Attention that can be replaced: by transformers' registry, in which ours is, or by a method.
_REPLACEABLE = ("ALL_ATTENTION_FUNCTIONS", "self._attn(query, key, value, attention_mask)")
_TRANSPOSED = "Conv1D("
_UNREAD = re.compile(r"_keys_to_ignore_on_load_unexpected = (\[.*?\])\n", re.DOTALL)
# The class of parts for images that other packages compute: the module and the name of each.
_OF_PACKAGES = "TimmWrapperModel"
_PACKAGES = {"timm": "timm", "PIL": "pillow"}
_DECODERS = ("ForCausalLM", "LMHeadModel")
_COMPOSITES = ("ForConditionalGeneration",)
# Decoders that transformers does not list as such: their checkpoints came as a part of a model of images.
_UNLISTED = {"mistral4": "Mistral4ForCausalLM"}

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_REASON_OF_LAYERS = {
    "indexed_attention": SPARSE,
    "heavily_compressed_attention": SPARSE,
    "compressed_sparse_attention": SPARSE,
    "recurrent": RECURRENT,
}
# Layers whose states the engine keeps, if their code uses the interface of transformers' caches; hybrid: attention beside.
_STATE_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba"})
_ATTENDING = _LAYER_TYPES | {"hybrid", "hybrid_sliding"}
_STATE_INTERFACE = "update_conv_state("
# Layers that keep nothing of earlier tokens, beside others.
_STATELESS_LAYERS = frozenset({"mlp", "moe"})
# The longest context of a model without positions: by default, and by a setting.
_WITHOUT_POSITIONS = (LENGTH_WITHOUT_POSITIONS, 2**20)
_SENSES = frozenset({"audio_config", "vision_config"})
# Modules with this decorator have the weights of all experts of a layer, and skip those of other ranks.
_EXPERTS_INTERFACE = "@use_experts_implementation"
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")


@dataclass(frozen=True)
class TransformersFacts:
    """A configuration of transformers that can be served. num_positions: the longest context in tokens without a setting.

    class_name: of transformers. max_positions: the longest one that a setting may ask for. is_tried: models of its type
    are known to load. kv_shapes: of each layer that keeps KV; None if unknown. windows: of each of these layers, the number
    of tokens that a token sees, None for all.
    """

    config: Any
    class_name: str
    num_positions: int
    max_positions: int
    is_tried: bool
    kv_shapes: tuple[KVShape, ...] | None
    windows: tuple[int | None, ...] = ()

    @property
    def text(self) -> Any:
        """Return the configuration of the decoder; that of a composite is a part of the whole."""
        return self.config.get_text_config()

    @property
    def has_states(self) -> bool:
        """Return whether it has recurrent layers."""
        return bool(_STATE_LAYERS & set(getattr(self.text, "layer_types", None) or ()))

    @property
    def unread(self) -> list[str]:
        """Return patterns of the names of tensors that transformers does not read, such as those of draft layers."""
        codes = {code for each in (self.config, self.text) for code in _code_of(each)}
        return sorted({name for code in codes for found in _UNREAD.findall(code) for name in _strings(found)})

    @property
    def num_experts(self) -> int:
        """Return the number of experts of a layer that can be spread over ranks; 0 without."""
        if not any(_EXPERTS_INTERFACE in text for text in _code_of(self.text)):
            return 0
        found = (getattr(self.text, name, None) for name in _NUMBERS_OF_EXPERTS)
        return next((number for number in found if isinstance(number, int)), 0)

    @property
    def is_composite(self) -> bool:
        """Return whether the model takes more than text; its text is served."""
        return self.text is not self.config or not _SENSES.isdisjoint(
            getattr(self.config, "sub_configs", None) or ()
        )


def read_facts(folder: Path, raw: RawConfig) -> TransformersFacts:
    """Read a folder whose architecture is not our own. Raises SettingError for one that is not served."""
    architecture = architecture_name(raw)
    if architecture is None or find_spec("transformers") is None:
        raise _unknown(architecture)
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = _class_names(architecture)
    kind = str(raw.get("model_type"))
    if architecture not in names.values() and (
        not names or _spelled(architecture) not in map(_spelled, (kind, names.get(kind, "")))
    ):
        raise _unknown(architecture)
    if kind not in CONFIG_MAPPING:
        raise unserved(
            architecture,
            f"its model_type is {raw.get('model_type')!r:.80}, and {_installed()} has none of that name",
        )
    with refusing(architecture):
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        class_name = names.get(config.model_type)
        if class_name is None or (architecture in names.values() and class_name != architecture):
            raise unserved(architecture, f"its model_type {config.model_type!r} stands for another")
        text = _served_text(architecture, raw, config)
        lengths = _lengths(text)
        if lengths is None:
            raise unserved(architecture, "config.json does not give its number of positions")
        shapes = _shapes(text)
        windows = () if shapes is None else _windows(text, len(shapes))[: len(shapes)]
        return TransformersFacts(config, class_name, *lengths, config.model_type in TRIED, shapes, windows)


def _served_text(architecture: str, raw: RawConfig, config: Any) -> Any:
    """Return the configuration of the decoder. Raises SettingError for one that is not served."""
    # Some of these types have no configuration of a text.
    reason = "it has an encoder" if config.is_encoder_decoder else REASON_OF_TYPE.get(config.model_type)
    if reason is not None:
        raise unserved(architecture, reason)
    text = config.get_text_config()
    reason = why_unserved(text) or _why_parts_missing(config)
    # Without sizes of its own it would be built as large as the type's default, before its weights are compared.
    if reason is None and text is not config and not isinstance(raw.get("text_config"), Mapping):
        is_flat = raw.get("hidden_size") == getattr(text, "hidden_size", None)
        reason = None if is_flat else "config.json has no text_config"
    if reason is not None:
        raise unserved(architecture, reason)
    return text


def _why_parts_missing(config: Any) -> str | None:
    """Return why the whole cannot be built: its part for images needs packages that are not installed."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    kinds = [getattr(getattr(config, name, None), "model_type", "") for name in config.sub_configs or ()]
    missing = [name for module, name in _PACKAGES.items() if find_spec(module) is None]
    if not missing or _OF_PACKAGES not in map(MODEL_MAPPING_NAMES.get, kinds):
        return None
    return f"its part for images needs {' and '.join(missing)}, not installed here: pip install timm pillow"


def _class_names(architecture: str) -> Mapping[str, str]:
    """Return transformers' classes of this ending by model_type; none for an ending that is not served."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    endings = next((each for each in (_DECODERS, _COMPOSITES) if architecture.endswith(each)), ())
    names = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **_UNLISTED}
    if endings is _COMPOSITES:
        names = dict(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    return {kind: name for kind, name in names.items() if name.endswith(endings)}


def _spelled(name: str) -> str:
    """Return an architecture or model_type without the differences in which publishers spell it otherwise."""
    for ending in (*_DECODERS, *_COMPOSITES):
        name = name.removesuffix(ending)
    return re.sub("[^a-z0-9]", "", name.lower())


@contextmanager
def refusing(architecture: str, *own_names: str) -> Iterator[None]:
    """Turn any error of transformers into the SettingError of a model that cannot be served.

    own_names: what an error names that comes from an attention which does not ask transformers' interface.
    """
    try:
        yield
    except KvbatonError:
        raise
    except Exception as error:
        is_ours = any(name in str(error) for name in own_names)
        why = OTHER_ATTENTION if is_ours else "transformers cannot run it so"
        told = " ".join(str(error).split())  # one line: the last line of a start is the reason
        raise unserved(architecture, f"{why} ({type(error).__name__}: {told})") from error


def why_unserved(config: Any) -> str | None:
    """Return why a model of this configuration would give wrong answers here, None if nothing is known against it."""
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "it has an encoder"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if layer_types & _STATE_LAYERS:
        if not _has_states(config):
            return RECURRENT
        layer_types -= _STATE_LAYERS | _STATELESS_LAYERS
    if unknown := sorted(layer_types - _LAYER_TYPES):
        return _REASON_OF_LAYERS.get(unknown[0], f"layers of the type {unknown[0]!r} are not served")
    is_encoder = config.model_type in ENCODERS and not getattr(config, "is_decoder", False)
    if is_encoder or getattr(config, "is_causal", True) is False:
        return LATER
    if reason := _why_latents_differ(config) or REASON_OF_TYPE.get(config.model_type):
        return reason
    return _reason_in_code(config)


def _code_of(config: Any) -> list[str]:
    """Return the text of a model's code: importing it would take seconds."""
    folder = Path(inspect.getfile(type(config))).parent
    return [file.read_text("utf-8") for file in folder.glob("modeling_*.py")]


def _strings(code: str) -> list[str]:
    """Return the strings of a list in Python; none if it has anything else."""
    try:
        found = ast.literal_eval(code)
    except (SyntaxError, ValueError):
        return []
    return [each for each in found if isinstance(each, str)]


def _has_states(config: Any) -> bool:
    """Return whether layers of a model keep states by the interface of transformers' caches."""
    return any(_STATE_INTERFACE in text for text in _code_of(config))


def _num_attending(config: Any) -> int | None:
    """Return the number of layers that keep KV; None if it is not given."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types and set(layer_types) & _STATE_LAYERS:
        return sum(each in _ATTENDING for each in layer_types)
    return getattr(config, "num_hidden_layers", None)


def _reason_in_code(config: Any) -> str | None:
    """Return why a model's code gives wrong answers here."""
    texts = _code_of(config)
    if getattr(config, "quantization_config", None) and any(_TRANSPOSED in text for text in texts):
        return "quantised layers that keep inputs before outputs (Conv1D) are not served"
    if not _num_attending(config):
        return None
    return None if any(name in text for text in texts for name in _REPLACEABLE) else OTHER_ATTENTION


def _why_latents_differ(config: Any) -> str | None:
    """Return why a latent is not that of all heads."""
    if getattr(config, "kv_lora_rank", None):
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None)
        # A latent gives each head a key of its own, which transformers would repeat.
        if kv_heads not in (None, heads):
            return f"latent attention with {kv_heads} KV heads (num_key_value_heads) for {heads} heads is not served"
    return None


def _unknown(architecture: str | None) -> SettingError:
    missing = (
        "" if find_spec("transformers") else " (which is not installed: pip install 'kvbaton[transformers]')"
    )
    if find_spec("transformers") and str(architecture).endswith((*_DECODERS, *_COMPOSITES)):
        missing = f" ({_installed()} has none of that name)"
    return SettingError(
        f"the model's architecture is {architecture!r}, which is not served; the served ones are "
        f"{', '.join(ARCHITECTURES)}, and every ...ForCausalLM, and the text of every ...ForConditionalGeneration, of "
        f"transformers{missing}",
        param="model",
    )


def _installed() -> str:
    return f"transformers {version('transformers')}, which is installed,"


def _windows(config: Any, num_layers: int) -> tuple[int | None, ...]:
    """Return how many tokens each layer sees, None for all; a chunk is no longer than a window of its size."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    types = getattr(config, "layer_types", None)
    if not types:
        return (window,) * num_layers
    of_type = {
        "sliding_attention": window,
        "hybrid_sliding": window,
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    return tuple(of_type.get(each) for each in types if each in _ATTENDING)


def _shapes(config: Any) -> tuple[KVShape, ...] | None:
    """Return the shape of each layer that keeps KV; None if the configuration does not give them."""
    num_layers = _num_attending(config)
    if num_layers is None:
        return None
    layers = list(getattr(config, "per_layer_config", None) or [config])
    found = [_shape_of(layer) for layer in layers]
    known = {shape for shape in found if shape is not None}
    if num_layers and len(known) == 1:
        found = [known.pop()] * num_layers
    # The last ones may read the KV of others.
    own = found[: num_layers - int(getattr(config, "num_kv_shared_layers", None) or 0)]
    shapes = tuple([shape for shape in own if shape is not None])
    return shapes if len(found) >= num_layers and len(shapes) == len(own) else None


def _shape_of(config: Any) -> KVShape | None:
    num_heads = getattr(config, "num_attention_heads", None)
    hidden_size = getattr(config, "hidden_size", None)
    if rank := getattr(config, "kv_lora_rank", None):
        return KVShape(LATENT, 1, int(rank) + int(config.qk_rope_head_dim))
    if not isinstance(num_heads, int) or not isinstance(hidden_size, int) or num_heads < 1:
        return None
    head_dim = getattr(config, "head_dim", None) or hidden_size // num_heads
    names = _KV_HEADS[-1:] if config.model_type in EXPERT_HEADS else _KV_HEADS
    kind = type(config)
    # config.json may contain fields that the type does not have, which nothing reads.
    declared = {*dir(kind), *config.attribute_map, *getattr(kind, "__dataclass_fields__", ())}
    found = (getattr(config, name, None) for name in names if name in declared)
    num_kv_heads = next((each for each in found if isinstance(each, int) and each), None)
    value_dim = getattr(config, "v_head_dim", None) or head_dim
    if num_kv_heads is None or not isinstance(head_dim, int) or value_dim != head_dim:
        return None
    return KVShape(KEY_VALUE, 1 if getattr(config, "multi_query", False) else num_kv_heads, head_dim)


def _rope(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rope parameters of each type of layer, or of all layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in rope.values() if isinstance(each, Mapping)]
    yield from nested or [rope]


def _lengths(config: Any) -> tuple[int, int] | None:
    """Return the longest context without a setting and the one that a setting may ask for; None if it is not given."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if not limit:
        return None if _num_attending(config) else _WITHOUT_POSITIONS
    if config.model_type in COMPUTES_ANGLES:
        limit = min(original for _, original, _ in _scaled_rope(config, limit))
    lengths = [
        context_lengths(kind, limit, original, float(parameters.get("factor") or 1.0))
        for kind, original, parameters in _scaled_rope(config, limit)
    ]
    return min((each[0] for each in lengths), default=limit), min(
        (each[1] for each in lengths), default=limit
    )


def angles(config: Any, length: int) -> str:
    """Return what angles that depend on the longest context are called in the fingerprint of the KV."""
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    named = (name_angles(kind, original, length) for kind, original, _ in _scaled_rope(config, limit))
    return next(filter(None, named), "")


def _scaled_rope(config: Any, limit: int) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    for parameters in _rope(config):
        original = limit
        if (
            parameters.get("rope_type") != "dynamic"
        ):  # transformers reads that of "dynamic" from the configuration alone
            original = int(parameters.get("original_max_position_embeddings") or limit)
        yield str(parameters.get("rope_type")), original, parameters
