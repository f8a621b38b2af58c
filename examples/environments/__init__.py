"""Ready-made environments through a real worker on the CPU, with SmolLM2 (fetched once) or a checkpoint of yours.

python -m examples.environments.reasoning    # reasoning-gym: questions with one right answer
python -m examples.environments.games        # textarena: games over several turns
python -m examples.environments.functions    # BFCL: tools with state, several users' turns
"""
