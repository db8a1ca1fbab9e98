"""The workers that are attached to a router: their state, their load, and the messages to them."""
