"""The runner of a GPU.

input        plans in pinned memory, copied without waiting
ops          the decoder's functions as kernels
graphs       decode steps, captured
pieces       steps that hold prompt tokens, captured but for attention
sampler      draws as kernels
runner       a step
"""
