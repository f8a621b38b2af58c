"""The trainer's side: submit groups of trajectories to a rollout worker, take the results, update its weights.

    with RolloutClient("tcp://127.0.0.1:5555") as client:
        client.update_weights("/shared/step-1", version=1)
        for trajectory in client.submit([client.group(prompt_ids, n=8, max_tokens=256)]):
            train_on(trajectory.response_ids, trajectory.response_logprobs, trajectory.response_mask)

Needs neither torch nor the engine, except that `push_weights` takes what a torch model is written with.
"""

from protocols.fields import Environment, Group, Sampling, ScriptedTurn
from protocols.replies import TurnDone
from rollout.client.batch import AsyncBatch, Batch
from rollout.client.client import AsyncRolloutClient, RolloutClient
from rollout.client.errors import ClientClosed, NotInstalled
from rollout.client.groups import sampling, turn
from rollout.client.trajectory import Trajectory
from rollout.client.weights import WeightUpdate

__all__ = [
    "AsyncBatch",
    "AsyncRolloutClient",
    "Batch",
    "ClientClosed",
    "Environment",
    "Group",
    "NotInstalled",
    "RolloutClient",
    "Sampling",
    "ScriptedTurn",
    "Trajectory",
    "TurnDone",
    "WeightUpdate",
    "sampling",
    "turn",
]
