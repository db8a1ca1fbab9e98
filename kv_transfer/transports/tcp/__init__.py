"""The ``tcp`` transport: blocks over a socket between any two hosts."""
