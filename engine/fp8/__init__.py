"""FP8 weights: FP8 matmul where the device can, else they are dequantized at load."""
