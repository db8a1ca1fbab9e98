"""The shapes of the models in `benchmarks.gpu`, and their rooflines.

Times are in seconds; a weight and a KV element have 2 bytes, a weight in FP8 one.
"""

from dataclasses import dataclass, replace

from engine.models.config import DecoderConfig, RopeConfig

_BYTES = 2


@dataclass(frozen=True)
class Ceilings:
    """The measured limits of a device per second: bytes (read and written by a copy; only read) and operations.

    matmul: of bfloat16. matmul_fp8: of FP8; None: the device cannot multiply it.
    """

    copy: float
    read: float
    matmul: float
    matmul_fp8: float | None = None


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes, with the names of DecoderConfig. is_fp8: the layers' matrices are in FP8, and are multiplied so."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    is_tied: bool = False
    has_qkv_bias: bool = False
    is_fp8: bool = False

    def config(self, max_position_embeddings: int) -> DecoderConfig:
        """Return the engine's configuration."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=1e-6,
            rope=RopeConfig("default", self.rope_theta),
            tie_word_embeddings=self.is_tied,
            sliding_windows=(None,) * self.num_layers,
            qkv_bias=self.has_qkv_bias,
        )

    @property
    def matrix_params(self) -> int:
        """The number of parameters of one layer's matrices."""
        queries = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * queries + 2 * self.hidden_size * kv
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_params(self) -> int:
        """The number of parameters of one layer."""
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.has_qkv_bias else 0
        return self.matrix_params + 2 * self.hidden_size + biases

    @property
    def num_params(self) -> int:
        """The number of parameters of the model."""
        tables = 1 if self.is_tied else 2
        return self.num_layers * self.layer_params + self.hidden_size + tables * self._table_params

    @property
    def step_params(self) -> int:
        """The number of parameters that a decode step reads: all except those of a separate input embedding."""
        return self.num_params - (0 if self.is_tied else self._table_params)

    @property
    def kv_bytes(self) -> int:
        """The KV size of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _BYTES

    @property
    def step_bytes(self) -> int:
        """The bytes of the weights that a decode step reads."""
        return self.step_params * _BYTES - self._fp8_params

    def decode_seconds(self, batch: int, context: int, ceilings: Ceilings) -> float:
        """Return a step's lower bound: weights at the rate of memory or matrix units, then KV at that of memory."""
        weights = self.step_bytes / ceilings.copy
        products = self._product_seconds(self.step_params, batch, ceilings)
        return max(weights, products) + batch * context * self.kv_bytes / ceilings.copy

    def prefill_seconds(self, batch: int, length: int, ceilings: Ceilings) -> float:
        """Return the lower bound for ``batch`` prompts: linear layers and attention at the rate of the matrix units."""
        linear = self._product_seconds(self.num_layers * self.layer_params, batch * length, ceilings)
        attention = 2 * length**2 * self.num_heads * self.head_dim * self.num_layers * batch
        return linear + attention / ceilings.matmul

    def _product_seconds(self, num_params: int, num_tokens: int, ceilings: Ceilings) -> float:
        """Return the time of the products of ``num_params``, which include all matrices of the layers."""
        others = 2 * (num_params - self._fp8_params) * num_tokens / ceilings.matmul
        if not self.is_fp8:
            return others
        if ceilings.matmul_fp8 is None:
            raise ValueError("the device's rate of products in FP8 was not measured")
        return others + 2 * self._fp8_params * num_tokens / ceilings.matmul_fp8

    @property
    def _fp8_params(self) -> int:
        return self.num_layers * self.matrix_params if self.is_fp8 else 0

    @property
    def _table_params(self) -> int:
        return self.vocab_size * self.hidden_size


@dataclass(frozen=True)
class HandOver:
    """A service to measure. is_converted: its decode worker has larger blocks."""

    shape: ModelShape
    transport: str
    is_converted: bool = False


LLAMA = ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, 500_000.0)
LLAMA_PART = replace(LLAMA, name="llama-3.1-8b, 8 of its 32 layers", num_layers=8, vocab_size=32768)
"""Computing and handing over take the same shares of a layer as in the whole model, which would be loaded for minutes."""
QWEN = ModelShape("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936, 1_000_000.0, True, True)
LLAMA_FP8 = replace(LLAMA, name="llama-3.1-8b, FP8", is_fp8=True)
TINY = ModelShape("tiny", 2, 64, 4, 2, 16, 96, 2048, 10_000.0)
TINY_FP8 = replace(TINY, name="tiny, FP8", is_fp8=True)
