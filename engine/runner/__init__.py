"""A plan made into tensors, run, and read back: the torch path, whose ends the GPU's shares.

input          plans packed into fixed buffers
ring           buffers written again only when their reader is done
torch_runner   a step of the decoder on the CPU
result_buffer  what a step sends to the host
"""
