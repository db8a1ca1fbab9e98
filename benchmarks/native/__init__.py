"""C that finds the limits of the machine; compiled when a benchmark first needs it (``benchmarks/ceilings.py``)."""
