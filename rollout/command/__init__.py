"""`rollout-worker`: from a command line to a running worker.

cli          the command
parser       its options as argparse has them
config_file  as a YAML file has them
options      all sources in one, each option with its origin
config       what they come to, with defaults
gpu          is there one, and what of it is lacking
descriptors  as many open files as the system allows
load         the model, the engine, the environments
advice       what to do about a failed start
summary      what a started worker says of itself
versions     of what it runs on
logs         text or JSON lines
start        bind, serve, drain
checksum     `rollout-worker checksum`
doctor       `rollout-worker doctor`
"""
