"""Hand-over by an engine of several ranks: a data half beside each rank's memory, one control half beside the scheduler.

The control half speaks with all of them as with one (``halves``): what it posts goes to every rank (``lines``), and what
the ranks report goes up once all have said it (``gathering``). A rank runs ``rank_half``.
"""
