"""Who may join, who somebody is, and what was refused.

Tokens and credentials are looked up by their hash. A refusal is an event; the secret that was
refused is in no event, no log and no answer.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Iterable

from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import ApiRole, JoinReply, JoinToken
from ravnest.schemas.providers import SignedCertificate
from ravnest.server.auth.ca import CertificateAuthorities
from ravnest.server.db.database import Database
from ravnest.server.db.members import StoredToken
from ravnest.server.db.records import MemberRecord
from ravnest.server.folder import ServerFolder, write_private
from ravnest.server.settings import Clock
from ravnest.transport.certificates import Authority, Identity

ADMIN = MemberRecord("admin", ApiRole.ADMIN, "admin")
DEFAULT_HOURS = 24.0
_HOUR = 3600.0


class AuthService:
    """Decides who is let in; every decision against somebody is written down."""

    def __init__(self, store: Database, folder: ServerFolder, clock: Clock | None = None) -> None:
        self._store = store
        self._folder = folder
        self._clock = clock or Clock()
        self._authorities = CertificateAuthorities(folder)

    def open(self) -> None:
        """Make the authority and the admin's credential at the first start."""
        self._own()
        credential = self._saved_admin() or secrets.token_urlsafe(32)
        with self._store.change(self._clock.wall()) as books:
            if books.members.get(ADMIN.id) is None:
                books.members.add(ADMIN, credential)
            elif books.members.known_by(credential, books.now) is None:
                books.members.renew(ADMIN.id, credential)
        write_private(self._folder.admin, credential.encode())

    @property
    def authority(self) -> str:
        """The certificate of the server's authority (PEM)."""
        return self._own().certificate.decode()

    @property
    def fingerprint(self) -> str:
        """By which members know the authority."""
        return self._own().fingerprint

    def server_identity(self, hosts: Iterable[str]) -> Identity:
        """A certificate for the server itself, good for these names and addresses."""
        return self._own().issue("ravnest-server", hosts)

    def create_token(
        self, role: ApiRole, fingerprint: str, *, uses: int | None = 1, hours: float = DEFAULT_HOURS
    ) -> JoinToken:
        """A token to join with; ``uses=None``: as often as wanted until it expires."""
        token = JoinToken.new(fingerprint)
        now = self._clock.wall()
        with self._store.change(now) as books:
            books.members.add_token(token.secret, role, uses=uses, expires=now + hours * _HOUR)
            often = "any number of" if uses is None else str(uses)
            books.events.add(
                "server",
                "token",
                f"a token for the role {role} was made: {often} uses within {hours:g} hours",
            )
        return token

    def join(self, secret: str, name: str, source: str, *, expires: float | None = None) -> JoinReply:
        """Exchange a token's secret for a credential; 401 if the token is not good."""
        credential = secrets.token_urlsafe(32)
        with self._store.change(self._clock.wall()) as books:
            token = books.members.token(secret)
            problem = _problem(token, books.now)
            if token is not None and problem is None:
                member = MemberRecord(f"{token.role}-{secrets.token_hex(6)}", token.role, name)
                books.members.use_token(token)
                books.members.add(member, credential, expires)
                books.events.add("server", member.id, f"{name} joined as {token.role} from {source}")
                return JoinReply(id=member.id, role=member.role, credential=credential)
            books.events.add("refusal", "token", f"{name} wanted to join from {source}: {problem}")
        raise ServerRefusedError(f"{problem}; ask for a new one: `ravnest token create`", 401)

    def member(self, credential: str, source: str) -> MemberRecord:
        """Who has this credential; 401 if nobody has."""
        now = self._clock.wall()
        with self._store.look() as books:
            member = books.members.known_by(credential, now)
        if member is None:
            raise self.refused(
                "credential", f"somebody at {source} showed a credential that is not known", 401
            )
        return member

    def refused(self, subject: str, reason: str, status: int = 403) -> ServerRefusedError:
        """The error to raise for a refusal, which is written down."""
        with self._store.change(self._clock.wall()) as books:
            books.events.add("refusal", subject, reason)
        return ServerRefusedError(reason, status)

    def sign(self, job: str, node: int, hosts: Iterable[str], request: str) -> SignedCertificate:
        """A certificate for a node of a job; only to be called for the provider that has the node."""
        return self._authorities.sign(job, node, hosts, request, self._now())

    def forget_job(self, job: str) -> None:
        """A job has ended: no more certificates for it."""
        self._authorities.forget(job)

    def _own(self) -> Authority:
        return self._authorities.own(self._now())

    def _now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._clock.wall(), datetime.UTC)

    def _saved_admin(self) -> str | None:
        try:
            return self._folder.admin.read_text(encoding="ascii").strip() or None
        except FileNotFoundError:
            return None


def _problem(token: StoredToken | None, now: float) -> str | None:
    """Why a token is not good."""
    if token is None:
        return "this server does not know the token"
    if token.expires is not None and token.expires <= now:
        return "the token has expired"
    if token.uses_left is not None and token.uses_left <= 0:
        return "the token has been used already"
    return None
