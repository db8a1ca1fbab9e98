"""A worker that computes prompts and lends their KV blocks."""
