"""What was submitted, what of it runs, what is kept.

batches      all of a worker
submitted    one of them: groups, samples, counts
admission    who may start
kv_budget    how much KV the started will need to their ends
record_size  how large a record may become
runs         trajectories as tasks
pace         how many finish in one breath
partials     surplus that may be resumed
"""
