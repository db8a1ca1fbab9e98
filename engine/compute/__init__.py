"""The computation of a step: inputs, forward pass, pooling, and the runner that combines them."""
