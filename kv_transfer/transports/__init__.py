"""The transports that move blocks between processes. ``registry.py`` opens one by its name and shows how to add one.

Files here are shared. Each transport has a folder of its own (``tcp``, ``shm``, ``nixl``, ``nccl``) and imports no other.
"""
