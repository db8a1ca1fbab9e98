"""A worker that computes prompts and hands over their KV blocks."""
