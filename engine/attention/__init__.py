"""Attention over the paged KV pool: one seam, several backends."""
