"""Checks of a trained model that a Root has uploaded, before its job is done: nothing is believed.

The server has the stages that it shipped. A trained stage must be the same graph, with tensors of the
same names, shapes and dtypes. Only headers and manifests are read, within the sizes of what was shipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ravnest.errors import StageFormatError
from ravnest.jobs.tensor_file import TensorFile
from ravnest.schemas.jobs import ResultFile
from ravnest.schemas.providers import Assignment
from ravnest.split.encoding import stage_from_json
from ravnest.split.written_state import changing_state
from ravnest.store.trained import FORMAT, VERSION, raw_key, raw_state

ResultCheck = Callable[[Sequence[ResultFile], Mapping[int, Assignment]], str]
"""Function of the files of a result and the cluster's assignments by node; returns what is wrong."""
_SLACK = 64 << 10
"""Bytes by which a manifest or a header may exceed those that were shipped."""


class ShippedResultCheck:
    """Compares results with what the server has shipped."""

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        """``path_of`` returns the path of an artifact."""
        self._path_of = path_of

    def __call__(self, files: Sequence[ResultFile], cluster: Mapping[int, Assignment]) -> str:
        """Return why files are not the trained stages of a cluster; empty if they are."""
        expected = sorted(f"node_{node}.{kind}" for node in cluster for kind in ("json", "safetensors"))
        by_name = {file.name: file for file in files}
        if sorted(file.name for file in files) != expected:
            return f"it has the files {', '.join(sorted(by_name)[:8])}; expected {', '.join(expected)}"
        runs = set()
        for node, assignment in cluster.items():
            manifest, weights = by_name[f"node_{node}.json"], by_name[f"node_{node}.safetensors"]
            try:
                runs.add(self._checked(assignment, manifest, weights))
            except (StageFormatError, OSError) as error:
                return f"node_{node}: {error}"
        return "" if len(runs) == 1 else "its stages are of different runs"

    def _checked(self, assignment: Assignment, manifest: ResultFile, weights: ResultFile) -> str:
        """Return the run of a trained stage; raise ``StageFormatError`` if it is not this stage."""
        found = self._json(manifest.artifact.sha256, assignment.stage.size + _SLACK)
        own = (FORMAT, VERSION, assignment.node_spec.plan, assignment.node, weights.artifact.sha256)
        named = tuple(found.get(name) for name in ("format", "version", "plan", "node", "sha256"))
        if named != own:
            raise StageFormatError("its manifest is of another plan, node or file of weights")
        shipped = self._json(assignment.stage.sha256, assignment.stage.size)
        shipped.pop("weights", None)
        if _canonical(found.get("stage")) != _canonical(shipped):
            raise StageFormatError("it is another graph than the one that was shipped")
        if found.get("raw") is True and assignment.training.ema is None:
            raise StageFormatError("it has averages of weights, which the job does not keep")
        self._check_weights(assignment, weights, _written_keys(found), _raw_keys(found))
        return str(found.get("run"))

    def _check_weights(
        self,
        assignment: Assignment,
        weights: ResultFile,
        written: frozenset[str] | None,
        raw: frozenset[str],
    ) -> None:
        """Compare the tensors with those that were shipped; ``raw`` are weights that it has twice."""
        path = self._path_of(weights.artifact.sha256)
        if path.stat().st_size > assignment.weights.size * (2 if raw else 1) + _SLACK:
            raise StageFormatError("its weights are larger than those that were shipped")
        shipped = TensorFile.read(self._path_of(assignment.weights.sha256)).tensors
        before = {key: t for key, t in shipped.items() if written is None or key in written}
        before |= {raw_key(key): t for key, t in shipped.items() if key in raw}
        after = TensorFile.read(path).tensors
        if before.keys() != after.keys():
            other = sorted(before.keys() ^ after.keys())
            raise StageFormatError(f"its tensors are not those that were shipped: {other[0][:200]}")
        for key, tensor in before.items():
            trained = after[key]
            if (trained.dtype, trained.shape) != (tensor.dtype, tensor.shape):
                raise StageFormatError(
                    f"{key} has shape {list(trained.shape)} and dtype {trained.dtype[:20]}; the "
                    f"shipped one had {list(tensor.shape)} and {tensor.dtype}"
                )

    def _json(self, sha256: str, most: int) -> dict[str, Any]:
        path = self._path_of(sha256)
        if path.stat().st_size > most:
            raise StageFormatError(f"its manifest has more than {most} bytes")
        try:
            found = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise StageFormatError(f"its manifest is damaged: {error}") from error
        if not isinstance(found, dict):
            raise StageFormatError("its manifest is not an object")
        return found


def _written_keys(manifest: dict[str, Any]) -> frozenset[str] | None:
    """Return the keys of a result without frozen weights; None if it has all.

    Its graph is the one that was shipped.
    """
    if manifest.get("changed_only") is not True:
        return None
    return frozenset(entry.key for entry in changing_state(stage_from_json(manifest["stage"])))


def _raw_keys(manifest: dict[str, Any]) -> frozenset[str]:
    """Return the keys of the weights that a result has besides their moving averages."""
    if manifest.get("raw") is not True:
        return frozenset()
    return frozenset(entry.names[0] for entry in raw_state(stage_from_json(manifest["stage"])))


def _canonical(value: object) -> str:
    """Return JSON that is equal for equal graphs; a constant of a graph may be NaN."""
    return json.dumps(value, sort_keys=True)
