"""The block copy in C, and what compiles and loads it."""
