"""Fused operations between a decoder's matrix products on CUDA: one kernel each instead of a dozen."""
