"""Limits of a stage that is read from a file, so that a forged one costs little time and memory.

The largest model of the zoo has 1,349 operations in each graph, and some 600 tensors.
"""

from __future__ import annotations

MAX_STAGE_BYTES = 128 << 20
"""Largest ``stage.json``: JSON takes about 30 times its size in memory while it is decoded, and the
largest graph that is allowed, in both modes, takes about half of this."""
MAX_OPERATIONS = 200_000
"""Most operations of a graph: one takes at least a microsecond per micro-batch and a kilobyte."""
MAX_VALUES = 20_000
"""Most inputs, and most outputs, of a graph: each is a tensor of every message between stages."""
MAX_STATE_TENSORS = 200_000
"""Most parameters, buffers and constants of a stage: each has a state of the optimizer."""
MAX_SYMBOLS = 1_000
"""Most sizes that vary between micro-batches."""
MAX_DIMENSIONS = 64
"""Most dimensions of a tensor, as in torch."""
MAX_ARGUMENTS = 20_000
"""Most values in the arguments of an operation, lists included: such as tensors to concatenate."""
MAX_ARGUMENT_DEPTH = 16
"""Deepest nesting of lists in an argument."""
MAX_STRUCTURE_DEPTH = 64
"""Deepest nesting of an input or output of the model."""
MAX_TEXT = 1_000
"""Most characters of a name or of a text among the arguments, such as an equation of einsum."""
