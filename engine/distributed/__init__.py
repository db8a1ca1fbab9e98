"""Several ranks as one engine: their processes, the calls to all of them, and what they add up with each other."""
