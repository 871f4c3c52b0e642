"""Who may have which artifact.

Only who sent all its bytes owns an artifact: to know a digest is not enough to get at the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects.sqlite import insert

from ravnest.schemas.base import Artifact
from ravnest.server.db.tables import artifacts

_AT_ONCE = 500


class ArtifactGrantRepository:
    """Owners (members, jobs, assignments) and their artifacts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def give(self, owner: str, files: Iterable[Artifact]) -> None:
        """From now on the owner has them."""
        rows = [
            {"owner": owner, "sha256": sha, "size": size}
            for sha, size in {file.sha256: file.size for file in files}.items()
        ]
        if rows:
            self._connection.execute(insert(artifacts).on_conflict_do_nothing(), rows)

    def take(self, owner: str) -> None:
        """From now on the owner has none."""
        self._connection.execute(delete(artifacts).where(artifacts.c.owner == owner))

    def has(self, owners: Iterable[str], sha256: str) -> bool:
        """Whether one of the owners has it."""
        query = select(artifacts.c.sha256).where(
            artifacts.c.owner.in_(list(owners)), artifacts.c.sha256 == sha256
        )
        return self._connection.execute(query.limit(1)).first() is not None

    def missing(self, owner: str, digests: Sequence[str]) -> tuple[str, ...]:
        """Those that the owner does not have, each once, in the order given."""
        found: set[str] = set()
        for start in range(0, len(digests), _AT_ONCE):
            asked = digests[start : start + _AT_ONCE]
            query = select(artifacts.c.sha256).where(
                artifacts.c.owner == owner, artifacts.c.sha256.in_(asked)
            )
            found.update(self._connection.execute(query).scalars())
        return tuple(digest for digest in dict.fromkeys(digests) if digest not in found)

    def sizes(self, owner: str) -> dict[str, int]:
        """All that an owner has, with their bytes."""
        query = select(artifacts.c.sha256, artifacts.c.size).where(artifacts.c.owner == owner)
        return {row.sha256: row.size for row in self._connection.execute(query)}

    def all(self) -> set[str]:
        """Every digest that somebody has."""
        return set(self._connection.execute(select(artifacts.c.sha256).distinct()).scalars())
