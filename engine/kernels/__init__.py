"""Triton, and CUDA C++ where that cannot say it; one task a file, each with a torch twin.

qk_norm_rope_write  norm of q and k, rotary turn, write to the cache
paged_decode        decode attention
tma_decode          on Hopper, in tma_decode.cu
decode_merge        its parts put together
norm                RMS norm, with the residual or without
scale               its first half
silu_mul            the activation
gate_up             gate and up over 17 to 256 rows, in gate_up.cu
cuda_source         compiled, with the .cuh files that share what is alike, and launched
skinny_linear       linears over few rows
skinny_vector       one row
skinny_dot          two rows and more
skinny_parts        what both share
cut                 where top-k and top-p cut a row
sample              noise, choice, logprobs
noise               counter-based
overlap             a launch before the end of the one ahead
"""
