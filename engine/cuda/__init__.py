"""The runner of a GPU.

input        plans in pinned memory, copied without waiting
ops          the decoder's functions as kernels
graphs       decode steps, recorded
sampler      draws as kernels
runner       a step
"""
