"""Trajectories, environments, the worker, its client. The rooms, in the order of events:

command      `rollout-worker` and its options: from a command line to a running worker
wire         sockets, sessions, records on their way
service      what a request does
batches      what was submitted, what of it runs, what is kept
trajectory   one trajectory from its prompt to its record
chat         messages to tokens
tools        functions that a model may call
environments what answers a turn
generation   turns asked of the engine
metrics      numbers for those who watch
client       the trainer's side
integrations other people's trainers
local        a worker of this process's own, for examples and tests
"""
