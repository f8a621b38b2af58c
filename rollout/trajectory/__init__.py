"""One trajectory from its prompt to its record.

spec         what it is to do, and how it ended
tokens       ids, sources, logprobs, versions
sampling     what a turn asks of the engine
trajectory   the state machine
rollout      the loop around it: engine, environment, clock
mailbox      answers of the trainer
deadline     of a turn, a tool, a trajectory
stopwatch    where its time goes
"""
