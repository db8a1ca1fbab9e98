"""The KV blocks of an engine: their holders, and the prefix cache."""
