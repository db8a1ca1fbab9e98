"""The ``shm`` transport: blocks of a peer on the same host, whose pool is mapped read-only."""
