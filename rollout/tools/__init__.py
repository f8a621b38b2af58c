"""Functions that a model may call.

tool         a function and its schema
parse        calls in what was said
run          all of a turn, side by side, each with its deadline
results      what they return, as text
command      a program as a tool's means
environment  a conversation with tools
modules      tools of modules named at the start
"""
