"""A trainer in small: an agent learns to find a hidden number, through a real rollout worker, on the CPU.

    python -m examples.find_number

environment.py is the plug-in that the worker loads, model.py the tiny checkpoint, grpo.py the training step, and
__main__.py the loop: submit groups, train, write weights, hot-reload.
"""
