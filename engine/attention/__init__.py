"""Attention over pages of KV, and how a batch is cut into parallel pieces.

torch_paged  the reference, and the CPU's
split        even streams of uneven rows
tables       what a kernel reads of them
shared       rows that read the same pages, read once
paged_step   what a GPU's step needs to know of its pages
flashinfer_paged  prompts, by FlashInfer
prefill_backend   by which of its kernels
"""
