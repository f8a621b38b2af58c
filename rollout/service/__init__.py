"""What a request does.

service      requests to handlers, replies to sessions
checks       what is refused before it starts
handlers     one a kind of request
score        logprobs of given ids
repeated     faults that are counted, and told once a minute
weights      updates, one at a time
wind_down    the end: nothing new, what runs gets its time
"""
