"""The plan of a step: which requests compute how many tokens in it."""
