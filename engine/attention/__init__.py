"""Attention over the paged KV pool: one interface, several backends."""
