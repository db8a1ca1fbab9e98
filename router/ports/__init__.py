"""The ports of a router: for clients, and for the streams of its workers."""
