"""Other people's environments.

config        how a task names itself
reasoning_gym questions with checkers
textarena     games
bfcl          tools of real APIs
"""
