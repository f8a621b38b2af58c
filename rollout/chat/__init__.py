"""Messages to tokens, and what a template puts between them.

messages     checked, in the one form that templates take
accept       those of a submit
template     as transformers renders it
sandbox      what one may do
sizes        how long what it makes may be
marks        text that no template takes for control tokens
follow       what stands between two turns, and the proof of it
format       both together: a checkpoint's chat format
conversation one trajectory's
tokenizer    text and bytes of ids
aside        beside the event loop
errors       the one error
"""
