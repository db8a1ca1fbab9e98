"""Runs the autoscaler's law over the router's policies and a timing model, in simulated time."""
