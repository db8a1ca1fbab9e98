"""A worker process: an engine and a connector, set up for one role."""
