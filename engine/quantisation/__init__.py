"""Checkpoints whose weights are stored in few bits: their formats, and the reader that dequantises them at load."""
