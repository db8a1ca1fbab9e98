"""The decoder families that the engine serves, and the models of transformers that it runs."""
