"""FP8 weights: read, multiplied as FP8 where the device can, else converted."""
