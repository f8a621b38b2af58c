"""TRL's trainers with their rollouts made by a worker.

    rollouts = GRPORollouts(client)                                       # trl.GRPOTrainer
    trainer = GRPOTrainer(model, reward, args=args, rollout_func=rollouts, ...)
    rollouts.attach(trainer)

    AsyncGRPOTrainer(                                                     # trl.experimental.async_grpo
        model, args=args, rollout_worker=AsyncRollouts(client, args, dataset, tokenizer),
        weight_transfer=WorkerWeights(client), ...
    )

Written against TRL 1.16, whose experimental seams these are.
"""

from rollout.integrations.trl.grpo import GRPORollouts
from rollout.integrations.trl.law import encode_prompt, law
from rollout.integrations.trl.rollouts import AsyncRollouts, Sample
from rollout.integrations.trl.weights import WorkerWeights

__all__ = ["AsyncRollouts", "GRPORollouts", "Sample", "WorkerWeights", "encode_prompt", "law"]
