"""Credentials: joining a server with a token, and the memberships of this user.

Memberships are stored in ``$RAVNEST_HOME/servers.json`` (``~/.config/ravnest`` by default), which only
its owner can read: a credential is equivalent to a password.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from filelock import FileLock

from ravnest.errors import ServerError
from ravnest.host import make_private
from ravnest.http.api import ApiClient, NotAServerError, is_loopback
from ravnest.http.retry import DEFAULT_RETRY, RetryPolicy
from ravnest.schemas.auth import ApiRole, JoinReply, JoinRequest, JoinToken, hashed

HOME_VARIABLE = "RAVNEST_HOME"
_FILE = "servers.json"
_LIMIT = 64 << 10
"""Most bytes of a certificate."""


class TokenError(ServerError, ValueError):
    """A token that is malformed, or not for this address."""


@dataclass(frozen=True)
class Membership:
    """A member's identity and credential at one server."""

    url: str
    id: str
    role: ApiRole
    credential: str = field(repr=False)
    authority: str | None = field(default=None, repr=False)
    """Certificate of the server's authority (PEM); ``None`` for plain HTTP on this machine."""
    name: str = ""
    token: str = field(default="", repr=False)
    """Hash of the token that it was created with."""

    def api(
        self, *, retry: RetryPolicy = DEFAULT_RETRY, transport: httpx.BaseTransport | None = None
    ) -> ApiClient:
        """Return a client that sends this member's credential."""
        return ApiClient(self.url, self.credential, self.authority, retry=retry, transport=transport)


def join(
    url: str,
    token_text: str,
    name: str,
    *,
    transport: httpx.BaseTransport | None = None,
    retry: RetryPolicy = DEFAULT_RETRY,
) -> Membership:
    """Exchange a token for a membership, without saving it.

    The token names the authority of the server; no secret is sent to a server of another authority.
    """
    token = _parse(token_text)
    url = _address(url, token)
    authority = _authority(url, token.fingerprint, transport) if token.fingerprint else None
    with ApiClient(url, authority=authority, retry=retry, transport=transport) as api:
        answer = api.post("/api/join", JoinRequest(secret=token.secret, name=name), JoinReply)
    return Membership(
        url, answer.id, answer.role, answer.credential, authority, name, hashed(token.secret)
    )


def joined(
    url: str,
    token_text: str,
    name: str,
    *,
    folder: Path | None = None,
    transport: httpx.BaseTransport | None = None,
    retry: RetryPolicy = DEFAULT_RETRY,
) -> Membership:
    """Return the membership that this token gave to this name before, or join and save a new one.

    A command with a one-time token can therefore be repeated as it is.
    """
    token = _parse(token_text)
    known = [
        member
        for member in memberships(folder)
        if (member.token, member.name) == (hashed(token.secret), name)
        and member.url == _address(url, token)
    ]
    if known:
        return known[-1]
    member = join(url, token_text, name, transport=transport, retry=retry)
    save(member, folder)
    return member


def _parse(text: str) -> JoinToken:
    try:
        return JoinToken.parse(text)
    except ValueError as error:
        raise TokenError(str(error)) from error


def _address(url: str, token: JoinToken) -> str:
    """Return the server's address with its scheme, if the token allows to send a secret there."""
    scheme = "https" if token.fingerprint else "http"
    url = (url if "://" in url else f"{scheme}://{url}").rstrip("/")
    if token.fingerprint and not url.startswith("https://"):
        raise TokenError(
            f"the token is for a server that uses HTTPS, and {url} does not begin with https://"
        )
    if not token.fingerprint and url.startswith("https://"):
        raise TokenError(
            f"the token has no fingerprint to identify {url} with; create another with `ravnest token "
            "create --role ROLE` on the server that uses HTTPS"
        )
    if not token.fingerprint and not is_loopback(url):
        raise TokenError(
            f"the token is for a server on the machine that made it, and {url} is another machine; "
            "start that server with `ravnest serve --host 0.0.0.0` and create a new token there"
        )
    return url


def _authority(url: str, fingerprint: str, transport: httpx.BaseTransport | None) -> str:
    """Fetch the certificate of the server's authority and compare it with the fingerprint."""
    pem = _unverified(url, transport)
    try:
        der = ssl.PEM_cert_to_DER_cert(pem)
    except ValueError as error:
        raise ServerError(f"the authority that {url} shows is not a certificate") from error
    if not secrets.compare_digest(hashlib.sha256(der).hexdigest(), fingerprint):
        raise NotAServerError(
            f"the certificate of {url} is not the one that the token names: it is another server, or "
            "the token is older than the server's folder"
        )
    return ssl.DER_cert_to_PEM_cert(der)


def _unverified(url: str, transport: httpx.BaseTransport | None) -> str:
    """Fetch the authority's certificate without verification; the caller compares it with the token."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.verify_mode = ssl.CERT_NONE
    with (
        ApiClient(url, tls=tls, transport=transport) as api,
        api.stream("/api/authority") as answer,
    ):
        pem = b""
        for chunk in answer.iter_bytes():
            pem += chunk
            if len(pem) > _LIMIT:
                raise ServerError(f"the authority that {url} shows is too long to be a certificate")
    return pem.decode("ascii", "replace")


def home() -> Path:
    """Return the folder of the user's credentials."""
    found = os.environ.get(HOME_VARIABLE)
    return Path(found) if found else Path.home() / ".config" / "ravnest"


def memberships(folder: Path | None = None) -> tuple[Membership, ...]:
    """Return all saved memberships."""
    path = (folder or home()) / _FILE
    try:
        listed: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["servers"]
        return tuple(Membership(**{**entry, "role": ApiRole(entry["role"])}) for entry in listed)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServerError(
            f"{path} cannot be read: {error}; remove it, and join your servers again with new tokens"
        ) from error


def save(membership: Membership, folder: Path | None = None) -> None:
    """Save a membership; it replaces an earlier one of the same server, role and name."""
    with _locked(folder or home()) as path:
        kept = [other for other in memberships(path.parent) if _key(other) != _key(membership)]
        _write(path, [*kept, membership])


def forget(membership: Membership, folder: Path | None = None) -> None:
    """Remove a saved membership."""
    with _locked(folder or home()) as path:
        _write(path, [other for other in memberships(path.parent) if _key(other) != _key(membership)])


def find(
    url: str, roles: Sequence[ApiRole], name: str | None = None, folder: Path | None = None
) -> Membership | None:
    """Return the newest membership of a server, in the first of ``roles`` that has one."""
    known = [
        member
        for member in memberships(folder)
        if member.url == url.rstrip("/") and name in (None, member.name)
    ]
    by_role = {member.role: member for member in known}
    return next((by_role[role] for role in roles if role in by_role), None)


def _key(membership: Membership) -> tuple[str, str, str]:
    return membership.url, membership.role, membership.name


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Lock the file while the block runs: several providers may join at once."""
    make_private(folder)
    with FileLock(folder / f".{_FILE}.lock"):
        yield folder / _FILE


def _write(path: Path, members: Sequence[Membership]) -> None:
    """Write the file atomically; at no time can others read it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    listed = [{**asdict(member), "role": member.role.value} for member in members]
    try:
        temporary.touch(mode=0o600, exist_ok=False)
        temporary.write_text(json.dumps({"servers": listed}, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
