"""Directions of messages in a pipeline: which neighbour may send which message.

A Leaf that could send what only the Root announces would end the run of all nodes, or save stages early.
"""

from __future__ import annotations

from ravnest.store.node_spec import NodeSpec
from ravnest.wire.messages import (
    AnyHead,
    Backward,
    CallEnd,
    CheckpointComplete,
    CheckpointStored,
    CheckpointWanted,
    ClipNorm,
    Decision,
    Forward,
    ForwardChallenge,
    ForwardResult,
    GradientNorms,
    LossSplit,
    PhaseBegin,
    PhaseEnd,
    Prepare,
    Prepared,
    Reduced,
    ResumeFrom,
    ResumeOffer,
    RunEnd,
    SaveStage,
    SharedGradients,
    SharedWeights,
    StageSaved,
    Start,
    StateLoaded,
    TakeCheckpoint,
)

_FROM_PREVIOUS = (
    CallEnd,
    CheckpointComplete,
    ClipNorm,
    Decision,
    Forward,
    PhaseBegin,
    PhaseEnd,
    Prepare,
    ResumeFrom,
    RunEnd,
    SaveStage,
    SharedWeights,
    Start,
    TakeCheckpoint,
)
_FROM_NEXT = (
    Backward,
    CheckpointStored,
    CheckpointWanted,
    ForwardChallenge,
    ForwardResult,
    GradientNorms,
    LossSplit,
    Prepared,
    Reduced,
    ResumeOffer,
    SharedGradients,
    StageSaved,
    StateLoaded,
)


def may_send(spec: NodeSpec, sender: int, head: AnyHead) -> bool:
    """Return whether a node is the neighbour of ``spec`` that sends such messages."""
    previous = None if spec.previous is None else spec.previous.node
    following = None if spec.next is None else spec.next.node
    if isinstance(head, _FROM_PREVIOUS):
        return sender == previous
    if isinstance(head, _FROM_NEXT):
        return sender == following and _is_behind(spec, head)
    return sender in (previous, following)


def _is_behind(spec: NodeSpec, head: AnyHead) -> bool:
    """Return False for the trained stage of a node that is not behind this one in the pipeline."""
    return not isinstance(head, StageSaved) or head.node in spec.pipeline[spec.stage + 1 :]
