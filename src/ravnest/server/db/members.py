"""Tokens and credentials, stored as SHA-256 hashes; they are long and random, so no salt is needed."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, insert, or_, select, update

from ravnest.schemas.auth import ApiRole, MemberView, hashed
from ravnest.server.db.records import MemberRecord
from ravnest.server.db.tables import credentials, tokens

_BY_HASH = select(credentials).where(credentials.c.hash == bindparam("hashed"))


@dataclass(frozen=True)
class StoredToken:
    """A token as it is stored."""

    hash: str
    role: ApiRole
    uses_left: int | None
    expires: float | None


@dataclass(frozen=True)
class FoundMember:
    """A member, and when its credential ends."""

    member: MemberRecord
    expires: float | None

    def is_active(self, now: float) -> bool:
        """Return whether the credential is valid."""
        return self.expires is None or self.expires > now


class MemberRepository:
    """Tokens, and the members that joined with them."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection = connection
        self._now = now

    def add_token(self, secret: str, role: ApiRole, *, uses: int | None, expires: float | None) -> None:
        """Add a token; ``uses=None`` means unlimited uses."""
        self._connection.execute(
            insert(tokens).values(
                hash=hashed(secret), role=role, uses_left=uses, created=self._now, expires=expires
            )
        )

    def token(self, secret: str) -> StoredToken | None:
        """Return the token with this secret, even if it is used up or has expired."""
        row = self._connection.execute(select(tokens).where(tokens.c.hash == hashed(secret))).first()
        if row is None:
            return None
        return StoredToken(row.hash, ApiRole(row.role), row.uses_left, row.expires)

    def tokens(self, now: float) -> list[StoredToken]:
        """Return the tokens that can still be used, newest first."""
        usable = or_(tokens.c.uses_left.is_(None), tokens.c.uses_left > 0)
        alive = or_(tokens.c.expires.is_(None), tokens.c.expires > now)
        query = select(tokens).where(usable, alive).order_by(tokens.c.created.desc())
        return [
            StoredToken(row.hash, ApiRole(row.role), row.uses_left, row.expires)
            for row in self._connection.execute(query)
        ]

    def remove_token(self, hashed_secret: str) -> StoredToken | None:
        """Delete a token; return it, or ``None`` if there is none."""
        chosen = tokens.c.hash == hashed_secret
        row = self._connection.execute(select(tokens).where(chosen)).first()
        if row is None:
            return None
        self._connection.execute(delete(tokens).where(chosen))
        return StoredToken(row.hash, ApiRole(row.role), row.uses_left, row.expires)

    def use_token(self, token: StoredToken) -> None:
        """Count one use of a token."""
        if token.uses_left is not None:
            chosen = update(tokens).where(tokens.c.hash == token.hash)
            self._connection.execute(chosen.values(uses_left=tokens.c.uses_left - 1))

    def add(self, member: MemberRecord, credential: str, expires: float | None = None) -> None:
        """Add a member."""
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
        """Replace the credential of a member."""
        chosen = update(credentials).where(credentials.c.member == member)
        self._connection.execute(chosen.values(hash=hashed(credential)))

    def by_hash(self, hashed_credential: str, now: float) -> FoundMember | None:
        """Return the member whose credential has this hash, unless it has expired."""
        row = self._connection.execute(_BY_HASH, {"hashed": hashed_credential}).first()
        if row is None:
            return None
        found = FoundMember(MemberRecord(row.member, ApiRole(row.role), row.name), row.expires)
        return found if found.is_active(now) else None

    def get(self, member: str) -> MemberRecord | None:
        """Return a member by id."""
        row = self._connection.execute(select(credentials).where(credentials.c.member == member)).first()
        return None if row is None else MemberRecord(row.member, ApiRole(row.role), row.name)

    def hash_of(self, member: str) -> str:
        """Return the hash of a member's credential."""
        query = select(credentials.c.hash).where(credentials.c.member == member)
        return str(self._connection.execute(query).scalar_one())

    def listed(self, now: float) -> list[MemberView]:
        """Return all members, oldest first."""
        rows = self._connection.execute(select(credentials).order_by(credentials.c.created))
        return [
            MemberView(
                id=row.member,
                role=ApiRole(row.role),
                name=row.name,
                created=row.created,
                expires=row.expires,
                active=row.expires is None or row.expires > now,
            )
            for row in rows
        ]

    def is_active(self, member: str, now: float) -> bool:
        """Return whether the credential of a member is valid."""
        found = select(credentials.c.expires).where(credentials.c.member == member)
        row = self._connection.execute(found).first()
        return row is not None and (row.expires is None or row.expires > now)

    def end(self, member: str) -> None:
        """End the credential of a member now."""
        chosen = update(credentials).where(credentials.c.member == member)
        self._connection.execute(chosen.values(expires=self._now))

    def forget_tokens(self, expired_before: float) -> None:
        """Delete tokens that expired before a time."""
        self._connection.execute(delete(tokens).where(tokens.c.expires < expired_before))
