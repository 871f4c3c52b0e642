"""Folders of earlier assignments that a provider keeps, because it or the server may need them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ravnest.provider.outcome import Outcome


class AssignmentFolders:
    """Folders besides that of the current assignment, and the results in them."""

    def __init__(self, begun: Iterable[str], kept: Mapping[str, Outcome]) -> None:
        """``begun``: assignments that may be continued. ``kept``: results that must be reported."""
        self._folders = set(begun)
        self._finished: set[str] = set()
        """Those of them that are trained to the end; their nodes may have to repeat the end."""
        self._kept = dict(kept)
        self._needed: frozenset[str] = frozenset()

    @property
    def finished(self) -> list[str]:
        """Assignments that are trained to the end, in order."""
        return sorted(self._finished)

    def is_needed(self, assignment: str) -> bool:
        """Return whether the server wants the folder of an earlier assignment to be kept."""
        return assignment in self._needed

    def need(self, assignments: Iterable[str]) -> None:
        """Take the earlier assignments whose folders the server wants to be kept."""
        self._needed = frozenset(assignments)

    def keep(self, assignment: str, *, is_trained: bool) -> None:
        """Keep the folder of an assignment that is left."""
        self._folders.add(assignment)
        if is_trained:
            self._finished.add(assignment)

    def take_result(self, assignment: str) -> Outcome | None:
        """Return the result of an assignment that begins again, if an earlier process has trained it."""
        return self._kept.pop(assignment, None)

    def take(self, assignment: str) -> bool:
        """Return whether an assignment that begins has a folder; it is the current one from now on."""
        is_known = assignment in self._folders
        self._folders.discard(assignment)
        self._finished.discard(assignment)
        return is_known

    def drop_unneeded(self, wanted: str | None, current: str | None) -> list[str]:
        """Forget the assignments whose folders the server does not need any more, and return them."""
        others = [assignment for assignment in self._kept if assignment != wanted]
        for assignment in others:
            del self._kept[assignment]
        self._finished |= {*others} & self._needed
        self._folders |= self._finished
        unwanted = [assignment for assignment in others if assignment not in self._needed]
        over = sorted(self._folders - self._needed - {wanted, current})
        self._folders -= {*over}
        self._finished -= {*over}
        return [*unwanted, *over]
