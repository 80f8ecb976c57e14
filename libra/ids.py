"""A type for every identifier, so that one cannot be passed for another."""

from typing import NewType

RunId = NewType("RunId", str)
"""One run directory's life, resumes included: `<config name>-<UTC time>-<4 hex>`."""

NodeRank = NewType("NodeRank", int)
SlotId = NewType("SlotId", int)
"""One schedulable device on a node: a GPU, or on CPU one rank or one tensor-parallel worker."""

InstanceId = NewType("InstanceId", str)
"""One vLLM server's name (`vllm-0`); it stays the same when the process is replaced."""

Incarnation = NewType("Incarnation", str)
"""One process behind an instance id; a new one for every start."""

ChildId = NewType("ChildId", str)
"""One supervised child's name (`vllm-0`, `trainer`)."""

ReplicaId = NewType("ReplicaId", str)
"""One hybrid replica's name (`hybrid-0`), never used twice in a run."""

Rank = NewType("Rank", int)
PolicyVersion = NewType("PolicyVersion", int)
"""v0 is the base model; training step k makes v(k)."""

PromptId = NewType("PromptId", str)
GroupId = NewType("GroupId", str)
"""The `n_samples` trajectories of one prompt in one attempt."""

TrajectoryId = NewType("TrajectoryId", str)
RequestId = NewType("RequestId", str)
