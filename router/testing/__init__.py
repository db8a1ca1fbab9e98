"""Workers without an engine: they register, accept legs and answer them from a script, over real sockets."""
