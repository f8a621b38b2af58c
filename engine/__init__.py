"""Tokens in, tokens and logprobs out. In the order of events, what crosses the seams beside what stands behind them:

handle       the seam to the rest of the house: what is told to an engine, and what it reports
request      what is asked for, and what comes back
check        what of a request is refused, by name
config       how large, and where
errors       one tree
handles      the engine behind that seam: in a thread, or in a process of its own
start        from a recipe to a loaded engine
engine       a step on the host: launch N+1, then finish N
scheduling   which rows run, in which blocks of KV, until when
step         the seam to the device: a plan, and what came of it
runner       a plan made into tensors, and its result read back
model        the decoder
attention    over pages of KV
sampling     the law, its noise, and what is drawn
cuda         the runner of a GPU
kernels      Triton and CUDA C++, one task a file
memory       who holds how much of it
weights      read, checked, exchanged
"""
