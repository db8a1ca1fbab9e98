"""Own, readable definitions of the decoder families that the engine serves."""
