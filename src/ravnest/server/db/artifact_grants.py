"""Permissions to read artifact_grants.

A member is granted an artifact after it has sent all of its bytes: knowing a digest is not enough to
read a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, delete, func, select
from sqlalchemy.dialects.sqlite import insert

from ravnest.schemas.base import Artifact
from ravnest.server.db.tables import artifact_grants

_AT_ONCE = 500


class ArtifactGrantRepository:
    """Owners (members and assignments) and the artifacts that they may read."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def grant(self, owner: str, files: Iterable[Artifact]) -> None:
        """Grant artifacts to an owner."""
        rows = [
            {"owner": owner, "sha256": sha, "size": size}
            for sha, size in {file.sha256: file.size for file in files}.items()
        ]
        if rows:
            self._connection.execute(insert(artifact_grants).on_conflict_do_nothing(), rows)

    def revoke(self, owner: str) -> None:
        """Revoke all grants of an owner."""
        self._connection.execute(delete(artifact_grants).where(artifact_grants.c.owner == owner))

    def revoke_files(self, owner: str, digests: Iterable[str]) -> None:
        """Revoke the grants of some artifacts of an owner."""
        for digest in digests:
            own = (artifact_grants.c.owner == owner) & (artifact_grants.c.sha256 == digest)
            self._connection.execute(delete(artifact_grants).where(own))

    def is_granted(self, sha256: str) -> bool:
        """Return whether anybody may read an artifact."""
        query = select(artifact_grants.c.sha256).where(artifact_grants.c.sha256 == sha256)
        return self._connection.execute(query.limit(1)).first() is not None

    def has(self, owners: Iterable[str], sha256: str) -> bool:
        """Return whether any of the owners may read an artifact."""
        query = select(artifact_grants.c.sha256).where(
            artifact_grants.c.owner.in_(list(owners)), artifact_grants.c.sha256 == sha256
        )
        return self._connection.execute(query.limit(1)).first() is not None

    def missing(self, owner: str, digests: Sequence[str]) -> tuple[str, ...]:
        """Return the distinct digests that are not granted to the owner, in the given order."""
        found: set[str] = set()
        for start in range(0, len(digests), _AT_ONCE):
            asked = digests[start : start + _AT_ONCE]
            query = select(artifact_grants.c.sha256).where(
                artifact_grants.c.owner == owner, artifact_grants.c.sha256.in_(asked)
            )
            found.update(self._connection.execute(query).scalars())
        return tuple(digest for digest in dict.fromkeys(digests) if digest not in found)

    def sizes(self, owner: str, digests: Iterable[str]) -> dict[str, int]:
        """Return the sizes of those of the artifacts that are granted to an owner, by digest."""
        asked, found = list(dict.fromkeys(digests)), {}
        query = select(artifact_grants.c.sha256, artifact_grants.c.size)
        for start in range(0, len(asked), _AT_ONCE):
            part = artifact_grants.c.sha256.in_(asked[start : start + _AT_ONCE])
            rows = self._connection.execute(query.where(artifact_grants.c.owner == owner, part))
            found.update({row.sha256: row.size for row in rows})
        return found

    def totals(self, owner: str) -> tuple[int, int]:
        """Return the size and the number of the artifacts of an owner."""
        query = select(func.coalesce(func.sum(artifact_grants.c.size), 0), func.count())
        row = self._connection.execute(query.where(artifact_grants.c.owner == owner)).one()
        return int(row[0]), int(row[1])

    def owners(self, sha256: str) -> list[str]:
        """Return everybody that may read an artifact."""
        query = select(artifact_grants.c.owner).where(artifact_grants.c.sha256 == sha256)
        return list(self._connection.execute(query).scalars())

    def all(self) -> set[str]:
        """Return every digest that is granted to anybody."""
        return set(self._connection.execute(select(artifact_grants.c.sha256).distinct()).scalars())
