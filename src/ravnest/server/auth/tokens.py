"""Authentication: tokens, credentials, certificates and refusals.

Tokens and credentials are looked up by their hash. Every refusal is an event; events, logs and replies
never contain the refused secret.
"""

from __future__ import annotations

import datetime
import logging
import secrets
from collections.abc import Iterable

from sqlalchemy.exc import OperationalError

from ravnest.errors import ServerRefusedError
from ravnest.relay.sockets import network_of
from ravnest.schemas.auth import ApiRole, JoinReply, JoinToken, MemberView, hashed
from ravnest.schemas.providers import SignedCertificate
from ravnest.server.auth.ca import CertificateAuthorities
from ravnest.server.auth.page_logins import PREFIX, PageLogins
from ravnest.server.db.database import Database
from ravnest.server.db.members import FoundMember, StoredToken
from ravnest.server.db.records import MemberRecord
from ravnest.server.folder import ServerFolder, write_private
from ravnest.server.rate_limits import Rate, RateLimits
from ravnest.server.settings import Clock
from ravnest.server.versioned_cache import VersionedCache
from ravnest.transport.certificates import Authority, Identity

ADMIN = MemberRecord("admin", ApiRole.ADMIN, "admin")
DEFAULT_HOURS = 24.0
CREDENTIAL_DAYS = 365.0
"""Days after which a member has to join again with a new token."""
_HOUR = 3600.0
_log = logging.getLogger(__name__)
_WRONG_TOKENS = Rate(burst=30, per_second=0.5)
"""Attempts to join with a wrong token, from one address."""
_WRONG_CREDENTIALS = Rate(burst=30, per_second=0.1)
"""Requests with an unknown credential, from one address, that become events."""
_DAY = 24 * _HOUR
_KNOWN_CREDENTIALS = 20_000
"""Credentials that need not be looked up in the database."""


class AuthService:
    """Authenticates members and signs certificates; records every refusal."""

    def __init__(self, db: Database, folder: ServerFolder, clock: Clock | None = None) -> None:
        self._db = db
        self._folder = folder
        self._clock = clock or Clock()
        self._authorities = CertificateAuthorities(folder)
        self._known: VersionedCache[FoundMember] = VersionedCache(_KNOWN_CREDENTIALS)
        """Members by the hash of their credential. Only this process changes credentials."""
        self.page_logins = PageLogins(folder, self._clock)
        self._wrong_tokens = RateLimits(_WRONG_TOKENS)
        self._wrong_credentials = RateLimits(_WRONG_CREDENTIALS)

    def open(self) -> None:
        """Create the authority and the admin's credential at the first start."""
        self._authority()
        credential = self._saved_admin() or secrets.token_urlsafe(32)
        with self._db.write(self._clock.wall()) as db:
            if db.members.get(ADMIN.id) is None:
                db.members.add(ADMIN, credential)
            elif db.members.by_hash(hashed(credential), db.now) is None:
                db.members.renew(ADMIN.id, credential)
        if credential != self._saved_admin():  # a start needs no space on the disk
            write_private(self._folder.admin, credential.encode())

    @property
    def authority(self) -> str:
        """Certificate of the server's authority (PEM)."""
        return self._authority().certificate.decode()

    @property
    def fingerprint(self) -> str:
        """Fingerprint by which members identify the authority."""
        return self._authority().fingerprint

    def server_identity(self, hosts: Iterable[str]) -> Identity:
        """Return a certificate and key of the server, valid for these names and addresses."""
        return self._authority().issue("ravnest-server", hosts)

    def create_token(
        self, role: ApiRole, fingerprint: str, *, uses: int | None = 1, hours: float = DEFAULT_HOURS
    ) -> JoinToken:
        """Create a token; ``uses=None`` means unlimited uses until it expires."""
        token = JoinToken.new(fingerprint)
        now = self._clock.wall()
        with self._db.write(now) as db:
            db.members.add_token(token.secret, role, uses=uses, expires=now + hours * _HOUR)
            often = "any number of" if uses is None else str(uses)
            db.events.add(
                "server",
                "token",
                f"a token for the role {role} was created: {often} uses within {hours:g} hours",
            )
        return token

    def tokens(self) -> list[StoredToken]:
        """Return the tokens that can still be used, newest first."""
        with self._db.read() as db:
            return db.members.tokens(self._clock.wall())

    def revoke_token(self, hashed_secret: str) -> None:
        """Delete a token, so that nobody joins with it any more; refuse (404) if there is none."""
        with self._db.write(self._clock.wall()) as db:
            found = db.members.remove_token(hashed_secret)
            if found is None:
                raise ServerRefusedError("there is no such token; it may have been used or expired", 404)
            db.events.add("server", "token", f"a token for the role {found.role} was revoked")

    def join(self, secret: str, name: str, source: str, *, expires: float | None = None) -> JoinReply:
        """Exchange a token's secret for a credential; refuse (401) if the token is not valid.

        The credential ends at ``expires``, or after ``CREDENTIAL_DAYS``. An address that sent many wrong
        tokens has to wait (429); the database is not asked.
        """
        wait = self._wrong_tokens.wait(network_of(source), self._clock.steady())
        if wait > 0:
            raise ServerRefusedError(
                "too many attempts to join from this address had a wrong token; try again later",
                429,
                wait,
            )
        credential = secrets.token_urlsafe(32)
        with self._db.write(self._clock.wall()) as db:
            token = db.members.token(secret)
            problem = _problem(token, db.now)
            if token is not None and problem is None:
                member = MemberRecord(f"{token.role}-{secrets.token_hex(6)}", token.role, name)
                db.members.use_token(token)
                db.members.add(member, credential, expires or db.now + CREDENTIAL_DAYS * _DAY)
                db.events.add("server", member.id, f"{name} joined as {token.role} from {source}")
                return JoinReply(id=member.id, role=member.role, credential=credential)
            self._wrong_tokens.take(network_of(source), self._clock.steady())
            db.events.add("refusal", "token", f"{name} tried to join from {source}: {problem}")
            role = ApiRole.PROVIDER if token is None else token.role
        raise ServerRefusedError(
            f"{problem}; ask for a new one: `ravnest token create --role {role}`", 401
        )

    def member(self, credential: str, source: str) -> MemberRecord:
        """Return the member with this credential; refuse (401) if there is none."""
        known = self.known_member(credential)
        if known is not None:
            return known
        key, changes = hashed(credential), self._known.changes
        with self._db.read() as db:
            if credential.startswith(PREFIX):
                own = self.page_logins.member_of(credential)
                member = None if own is None else db.members.get(own)
                if member is not None and db.members.is_active(member.id, self._clock.wall()):
                    return member
            found = db.members.by_hash(key, self._clock.wall())
        if found is None:
            reason = f"a request from {source} had a credential that is unknown, expired or revoked"
            if self._wrong_credentials.take(network_of(source), self._clock.steady()) > 0:
                raise ServerRefusedError(reason, 401)  # there are enough events about this address
            raise self.refused("credential", reason, 401)
        self._known.put(key, found, changes)
        return found.member

    def known_member(self, credential: str) -> MemberRecord | None:
        """Return the member with this credential if that is known without the database."""
        found = self._known.get(hashed(credential))
        return found.member if found is not None and found.is_active(self._clock.wall()) else None

    def check_active(self, member: MemberRecord) -> None:
        """Refuse (401) a member whose credential was revoked, or has expired, while it waited."""
        with self._db.read() as db:
            if db.members.is_active(member.id, self._clock.wall()):
                return
        raise self.refused(member.id, f"the credential of {member.name} was revoked or has expired", 401)

    def members(self) -> list[MemberView]:
        """Return all members."""
        with self._db.read() as db:
            return db.members.listed(self._clock.wall())

    def revoke(self, member: str) -> MemberRecord:
        """End the credential of a member; refuse if there is none (404), or it is the admin's (409)."""
        if member == ADMIN.id:
            raise ServerRefusedError(
                "the admin is who can read the server's folder: delete admin.credential and start the "
                "server again for a new credential",
                409,
            )
        with self._db.write(self._clock.wall()) as db:
            found = db.members.get(member)
            if found is None:
                raise ServerRefusedError(f"there is no member {member}", 404)
            if db.members.is_active(member, db.now):
                db.members.end(member)
                db.events.add("server", member, f"the credential of {found.name} was revoked")
            key = db.members.hash_of(member)
        self._known.forget([key])
        return found

    def refused(self, subject: str, reason: str, status: int = 403) -> ServerRefusedError:
        """Record a refusal; return the error to raise."""
        try:
            with self._db.write(self._clock.wall()) as db:
                db.events.add("refusal", subject, reason)
        except OperationalError as error:  # the disk is full: the refusal stands
            _log.warning("a refusal was not recorded: %s", error.orig)
        return ServerRefusedError(reason, status)

    def sign(self, job: str, node: int, request: str, generation: int = 0) -> SignedCertificate:
        """Sign a certificate for a node of a job; the caller checks that the provider has the node."""
        return self._authorities.sign(job, node, generation, request, self._now())

    def forget_job(self, job: str) -> None:
        """Stop signing certificates for a job that has ended."""
        self._authorities.forget(job)

    def _authority(self) -> Authority:
        return self._authorities.own(self._now())

    def _now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._clock.wall(), datetime.UTC)

    def _saved_admin(self) -> str | None:
        try:
            return self._folder.admin.read_text(encoding="ascii").strip() or None
        except FileNotFoundError:
            return None


def _problem(token: StoredToken | None, now: float) -> str | None:
    """Return why a token is not valid; ``None`` if it is."""
    if token is None:
        return "this server does not know the token"
    if token.expires is not None and token.expires <= now:
        return "the token has expired"
    if token.uses_left is not None and token.uses_left <= 0:
        return "the token has been used already"
    return None
