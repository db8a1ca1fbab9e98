"""The residual stream of a step: what layers read of it and add to it, each in as few launches as its product allows."""

from torch import Tensor

from engine.fused.few_rows import FewRows, Norm
from engine.fused.few_tiles import Form, Tiles
from engine.fused.product import Linear, Product, SummedProduct
from engine.fused.rows import gated, normed


class Residual:
    """States ``[num_tokens, hidden_size]``, changed in place.

    A product of few rows is one kernel with its norm, gate or sum. Other products leave their sum to the next norm, and so
    does one that ranks add up: its result is known behind the collective only.
    """

    def __init__(self, states: Tensor, eps: float, few_rows: FewRows) -> None:
        self._states = states
        self._eps = eps
        self._few_rows = few_rows
        self._added: Tensor | None = None

    def normed(self, norm: Tensor) -> Tensor:
        """Return the norm with weight ``norm [hidden_size]``."""
        added = self._added
        self._added = None
        return normed(self._states, added, norm, self._eps)

    def multiplied(self, product: Linear, norm: Tensor) -> Tensor:
        """Return the product of the norm."""
        tiles = self._few_rows.tiles(product, self._states, Form.NORMED)
        if tiles is None or not isinstance(product, Product):
            return product(self.normed(norm))
        return self._few_rows.multiply(product, *self._read(tiles, norm))

    def gated(self, product: Linear, norm: Tensor) -> Tensor:
        """Return silu(gate) × up; the product of the norm has gate and up side by side."""
        tiles = self._few_rows.tiles(product, self._states, Form.GATED)
        if tiles is None or not isinstance(product, Product):
            return gated(product(self.normed(norm)))
        return self._few_rows.multiply(product, *self._read(tiles, norm), is_gated=True)

    def add(self, product: Linear, states: Tensor) -> None:
        """Add the product of ``states``."""
        own = product.part if isinstance(product, SummedProduct) else product
        tiles = self._few_rows.tiles(own, states, Form.ADDED)
        if isinstance(product, SummedProduct) and tiles is not None:
            self._added = product.total(self._few_rows.multiply(product.part, states, tiles))
        elif tiles is None or not isinstance(product, Product):
            self._added = product(states)
        else:
            self._few_rows.add(product, states, tiles, self._states)

    def _read(self, tiles: Tiles, norm: Tensor) -> tuple[Tensor, Tiles, Norm | None]:
        """Return what a product of few rows reads: one row before its norm, or the norm of several."""
        if tiles.rows == 1 and self._added is None:
            return self._states, tiles, Norm(norm, self._eps)
        return self.normed(norm), tiles, None
