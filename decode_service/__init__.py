"""A worker that fetches KV blocks and streams tokens."""
