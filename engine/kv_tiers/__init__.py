"""Storage beside the KV pool that keeps copies of its full blocks: a tier in host memory."""
