"""What was submitted, what of it runs, what is kept.

batches      all of a worker
submitted    one of them: groups, samples, counts
admission    who may start
record_size  how large a record may become
waiting      those that have not started, and their deadlines
runs         trajectories as tasks
partials     surplus that may be resumed
"""
