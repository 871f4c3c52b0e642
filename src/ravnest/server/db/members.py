"""Tokens and credentials. Both are random and long, so a plain sha256 of them is all that is kept."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select, update

from ravnest.schemas.auth import ApiRole, hashed
from ravnest.server.db.records import MemberRecord
from ravnest.server.db.tables import credentials, tokens


@dataclass(frozen=True)
class StoredToken:
    """A token as it is kept."""

    hash: str
    role: ApiRole
    uses_left: int | None
    expires: float | None


class MemberRepository:
    """Who may join, and who has joined."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection = connection
        self._now = now

    def add_token(self, secret: str, role: ApiRole, *, uses: int | None, expires: float | None) -> None:
        """Keep a new token; ``uses=None``: as often as wanted."""
        self._connection.execute(
            insert(tokens).values(
                hash=hashed(secret), role=role, uses_left=uses, created=self._now, expires=expires
            )
        )

    def token(self, secret: str) -> StoredToken | None:
        """The token with this secret, even if it can no longer be used."""
        row = self._connection.execute(select(tokens).where(tokens.c.hash == hashed(secret))).first()
        if row is None:
            return None
        return StoredToken(row.hash, ApiRole(row.role), row.uses_left, row.expires)

    def use_token(self, token: StoredToken) -> None:
        """Count one use."""
        if token.uses_left is not None:
            chosen = update(tokens).where(tokens.c.hash == token.hash)
            self._connection.execute(chosen.values(uses_left=tokens.c.uses_left - 1))

    def add(self, member: MemberRecord, credential: str, expires: float | None = None) -> None:
        """Keep a new member."""
        self._connection.execute(
            insert(credentials).values(
                hash=hashed(credential),
                member=member.id,
                role=member.role,
                name=member.name,
                created=self._now,
                expires=expires,
            )
        )

    def renew(self, member: str, credential: str) -> None:
        """Give a member another credential in place of the one it had."""
        chosen = update(credentials).where(credentials.c.member == member)
        self._connection.execute(chosen.values(hash=hashed(credential)))

    def known_by(self, credential: str, now: float) -> MemberRecord | None:
        """The member with this credential, unless it has expired."""
        found = select(credentials).where(credentials.c.hash == hashed(credential))
        row = self._connection.execute(found).first()
        if row is None or (row.expires is not None and row.expires <= now):
            return None
        return MemberRecord(row.member, ApiRole(row.role), row.name)

    def get(self, member: str) -> MemberRecord | None:
        """A member by id."""
        row = self._connection.execute(select(credentials).where(credentials.c.member == member)).first()
        return None if row is None else MemberRecord(row.member, ApiRole(row.role), row.name)

    def forget_tokens(self, expired_before: float) -> None:
        """Remove tokens that expired long ago."""
        self._connection.execute(delete(tokens).where(tokens.c.expires < expired_before))
