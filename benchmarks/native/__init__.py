"""C code that measures the machine's limits; compiled at first use (``benchmarks/ceilings.py``)."""
