"""KV that other workers compute or read: lent blocks, and requests in WAITING_FOR_REMOTE_KVS."""
