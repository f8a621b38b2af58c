"""From a recipe to an engine that has run its largest steps.

recipe       what to load, as plain data
build        load it
progress     how far it is
warm_up      the largest steps, once
collector    what is there stays: the garbage collector need not look at it
"""
