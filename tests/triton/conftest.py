"""Collects the tests whose modules import Triton only where it is installed; elsewhere they are deselected anyway."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("triton") else ["test_splits.py", "test_fused_decoder.py"]
