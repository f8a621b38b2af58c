"""What a trainer hands back to go on: groups that the worker has kept, and trajectories that it has returned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocols.errors import BadRequest
from protocols.fields import Group, Record
from rollout.client.trajectory import Trajectory
from rollout.client.values import instance


def resumption(
    resume: Sequence[Group | Trajectory],
) -> tuple[tuple[Group, ...], tuple[Group, ...], tuple[Record, ...]]:
    """Groups to be resumed by the ids of their trajectories, groups to be submitted again, and the records of those.

    Of a group that is submitted again only what ends in the new batch counts. Raises BadRequest for a trajectory that
    cannot go on.
    """
    kept: list[Group] = []
    again: dict[str, Group] = {}
    records: list[Record] = []
    for i, item in enumerate(resume):
        instance(item, Group | Trajectory, f"resume[{i}]")
        if isinstance(item, Group):
            kept.append(item)
            continue
        record, group = item.record, item.group
        if record.partial is None or group is None:
            why = f"{item.trajectory_id} cannot go on: it is {item.status} ({item.finish_reason}), or its environment"
            raise BadRequest(f"{why} does not say its state", field=f"resume[{i}]")
        known = again.get(group.id)
        again[group.id] = group.model_copy(
            update={
                "trajectory_ids": (*(known.trajectory_ids if known else ()), record.trajectory_id),
                "sample_indices": (*((known.sample_indices or ()) if known else ()), record.sample_index),
                "sampling": record.sampling,
                "counted": 0,
            }
        )
        records.append(record)
    return tuple(kept), tuple(again.values()), tuple(records)


def merged(groups: Iterable[Group]) -> tuple[Group, ...]:
    """One group for each id, with the trajectories of all of that id: parts of a group that went on in several
    batches, or were kept and returned, may come together again."""
    found: dict[str, Group] = {}
    for group in groups:
        first = found.get(group.id)
        if first is not None:
            indices = [part.sample_indices or range(len(part.trajectory_ids)) for part in (first, group)]
            group = first.model_copy(
                update={
                    "trajectory_ids": (*first.trajectory_ids, *group.trajectory_ids),
                    "sample_indices": (*indices[0], *indices[1]),
                }
            )
        found[group.id] = group
    return tuple(found.values())
