"""Compiles the project's C code at first use on a machine, and caches it for the user."""
