"""What lies between a decoder's matrix products on CUDA, a kernel each instead of a dozen."""
