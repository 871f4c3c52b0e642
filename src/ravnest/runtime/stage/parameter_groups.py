"""Parameter groups by name: settings of the optimizer for the parameters whose names match."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

Named = Iterable[tuple[str, nn.Parameter]]


def matches(name: str, patterns: str) -> bool:
    """Return whether a name matches one of the patterns, which ``|`` separates.

    ``*`` stands for any text, ``?`` for any character, ``[ab]`` for one of these characters.
    """
    return any(fnmatchcase(name, pattern.strip()) for pattern in patterns.split("|"))


def grouped(
    groups: Sequence[tuple[str, Mapping[str, Any]]], params: Mapping[str, Any]
) -> Callable[[Named], tuple[list[dict[str, Any]], Mapping[str, Any]]]:
    """Return ``optimizer_params`` for ``Node``: each parameter is in the first group that matches.

    ``params`` are the settings of all others, and defaults of the groups. Every stage has all groups,
    some without parameters, so that schedulers and checkpoints find the same groups everywhere.
    """

    def divide(named: Named) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
        found: list[list[nn.Parameter]] = [[] for _ in range(len(groups) + 1)]
        for name, parameter in named:
            matching = (i for i, (patterns, _) in enumerate(groups, 1) if matches(name, patterns))
            found[next(matching, 0)].append(parameter)
        settings = ({}, *(dict(own) for _, own in groups))
        return [own | {"params": members} for own, members in zip(settings, found, strict=True)], params

    return divide
