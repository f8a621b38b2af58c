"""`rollout-worker doctor`: would a worker with these options start on this machine, and if not, what is to be done?

Each check is a function that yields findings. What it judges is read in one place and judged in another, so that
machines that are not at hand can be judged in tests.
"""
