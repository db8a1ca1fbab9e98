"""LinearOps of tests: layers whose weights count twice, which shows in every forward pass that uses them."""

from collections.abc import Iterator

from torch import Tensor, nn

from engine.models.decoder import CausalLM
from engine.models.linear import DenseLinear, LinearOp, Product


class Doubled(DenseLinear):
    """A layer that can only be called; it returns twice its product, and counts its calls."""

    form = "doubled numbers"
    num_calls = 0

    def forward(self, states: Tensor) -> Tensor:
        self.num_calls += 1
        return 2 * super().forward(states)

    @property
    def matrix(self) -> Product | None:
        return None


class DoubledMatrix(Doubled):
    """A layer that returns twice its product, and also has a matrix, which passes with kernels of their own multiply by."""

    @property
    def matrix(self) -> Product | None:
        return Product(2 * self.weight.detach(), None if self.bias is None else 2 * self.bias.detach())


def linear_ops(model: nn.Module) -> Iterator[tuple[str, DenseLinear]]:
    """Iterate over the linear layers of a model, by name."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LinearOp):
            assert isinstance(module, DenseLinear)
            yield name, module


def replace_layers(model: CausalLM, kind: type[Doubled], *endings: str) -> list[Doubled]:
    """Put layers of this kind with the same weights in the place of those with these endings; return them."""
    made = []
    for name, layer in linear_ops(model):
        if name.endswith(endings):
            other = kind(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
            other.weight, other.bias = layer.weight, layer.bias
            model.set_submodule(name, other)
            made.append(other)
    return made


def double_weights(model: CausalLM, *endings: str) -> None:
    """Double weights and biases of the layers with these endings in place."""
    for name, layer in linear_ops(model):
        if name.endswith(endings):
            for parameter in layer.parameters():
                parameter.data = 2 * parameter.data
