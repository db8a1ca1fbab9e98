"""The control links between workers: sockets, frames, and the one thread that owns them."""
