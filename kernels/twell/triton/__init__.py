"""The kernels in Triton, for NVIDIA GPUs from Ampere on. `import triton` in these files is absolute: the compiler."""
