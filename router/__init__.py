"""Text in, text out: picks the workers and owns the request's life. Never torch, never KV bytes."""
