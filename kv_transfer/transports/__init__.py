"""The transports behind the seam ``transport.py``, and the registry that opens one by its name.

What transports share lies here; each has a room of its own (``tcp``, ``shm``, ``nixl``, ``nccl``) and imports no other.
"""
