"""The inference plan in Triton, for NVIDIA GPUs from Ampere on. `import triton` in here is the real one: absolute."""
