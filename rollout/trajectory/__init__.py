"""One trajectory from its prompt to its record.

spec         what it is to do
tokens       ids, sources, logprobs, versions
segments     those of a conversation that branched, each with its tokens
turns        what a record says of each
bounds       how long it may become
sampling     what a turn asks of the engine
trajectory   the state machine
context      what its environment is told
state        of its environment, for it to go on elsewhere
rollout      the loop around it: engine, environment, clock
mailbox      answers of the trainer
stopwatch    where its time goes
"""
