"""The deciding half of the engine: which requests compute what in each step. Plain integers, no tensors."""
