"""The transports behind ``kv_transfer/transport.py``, and the registry that opens one by its name."""
