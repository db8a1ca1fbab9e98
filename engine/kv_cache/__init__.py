"""The paged KV cache: what a layer needs, how much fits, and the pool itself."""
