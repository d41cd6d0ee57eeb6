"""The few fixed-order kernels and their torch twins."""
