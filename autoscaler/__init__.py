"""Decides how many workers each pool has: the law, the model of times that it calculates with, and its simulation."""
