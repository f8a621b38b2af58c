"""Numbers for those who watch.

names        all of them, with unit and meaning
observer     what the worker tells
watch        counts it
rounds       a row a round
gauges       the machine as it is now
self_check   one trajectory a round, scored again
row          what every place is given
feed         a place on a thread of its own
places       which of them
jsonl        a file
live         the terminal
prometheus   a port
health       does the worker work
wandb_run    W&B, from here
wandb_child  W&B, the process over there
"""
