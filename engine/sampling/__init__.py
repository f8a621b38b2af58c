"""What a token is sampled from, and its logprob.

law          filters: the distribution itself
penalties    counts of what was said
noise        counter-based: the same draw wherever it runs
sampler      draws, and logprobs of what was drawn
prompt_scores  logprobs of what was given
"""
