"""Who holds how much memory.

memory       the plan, and the one place that takes it
free_memory  how much there is
kv_size      how many blocks of KV that makes
pinned       host memory that a GPU reads by itself
"""
