"""CUDA C++ kernels for Hopper (sm_90a), compiled at first use by NVRTC.

`ptx.cuh` wraps the instructions, each `.cu` file is one operation, `compiler` makes cubins, `driver` launches them.
"""
