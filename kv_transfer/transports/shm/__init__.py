"""The ``shm`` transport: the pool of a peer on the same host, mapped read-only."""
