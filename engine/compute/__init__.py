"""How a step is computed: inputs, the forward pass, pooling, and the runner that joins them."""
