"""A decoder's forward pass in C, for bfloat16 on processors with AVX-512 and its dot product (ADR 0013)."""
