"""Which rows run next, in which blocks of KV, until when. No torch.

sequence     a request on its way
block_pool   blocks of KV, counted and cached by content
kv_holds     KV kept between the turns of a trajectory
slots        a row for each running request
scheduler    decode first, then prompts, in one budget of tokens
scheduled    its choice as a plan for the device
results      what a step gave each request
stop         where a request ends
phases       where the time of a request went
"""
