"""Joining a server with a token, and the servers that this user has joined.

They are kept in ``$RAVNEST_HOME/servers.json`` (``~/.config/ravnest`` by default), which only its
owner can read: a credential in it is worth as much as a password.
"""

from __future__ import annotations

import fcntl
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

from ravnest.errors import ServerError
from ravnest.http.api import ApiClient, NotAServerError, is_loopback
from ravnest.http.retry import PATIENT, RetryPolicy
from ravnest.schemas.auth import ApiRole, JoinReply, JoinRequest, JoinToken, hashed

HOME_VARIABLE = "RAVNEST_HOME"
_FILE = "servers.json"
_LIMIT = 64 << 10
"""Bytes of a certificate."""


class TokenError(ServerError, ValueError):
    """A token that is none, or not one for this address."""


@dataclass(frozen=True)
class Membership:
    """Who we are to a server."""

    url: str
    id: str
    role: ApiRole
    credential: str = field(repr=False)
    authority: str | None = field(default=None, repr=False)
    """PEM; None where the server speaks plain HTTP on this machine."""
    name: str = ""
    token: str = field(default="", repr=False)
    """The hash of the token that it was made with."""

    def api(
        self, *, patience: RetryPolicy = PATIENT, transport: httpx.BaseTransport | None = None
    ) -> ApiClient:
        """The server, asked by this member."""
        return ApiClient(
            self.url, self.credential, self.authority, patience=patience, transport=transport
        )


def join(
    url: str,
    token_text: str,
    name: str,
    *,
    transport: httpx.BaseTransport | None = None,
    patience: RetryPolicy = PATIENT,
) -> Membership:
    """Exchange a token for a membership; it is not saved yet.

    The token says by which authority the server is known: nothing secret is sent to another one.
    """
    token = _parse(token_text)
    url = _address(url, token)
    authority = _authority(url, token.fingerprint, transport) if token.fingerprint else None
    with ApiClient(url, authority=authority, patience=patience, transport=transport) as api:
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
    patience: RetryPolicy = PATIENT,
) -> Membership:
    """The membership that this token gave to this name before, else a new one, which is saved.

    So a command with a token that is good for one use can be repeated as it is.
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
    member = join(url, token_text, name, transport=transport, patience=patience)
    save(member, folder)
    return member


def _parse(text: str) -> JoinToken:
    try:
        return JoinToken.parse(text)
    except ValueError as error:
        raise TokenError(str(error)) from error


def _address(url: str, token: JoinToken) -> str:
    """The server's address, if a secret may be sent there as the token says."""
    scheme = "https" if token.fingerprint else "http"
    url = (url if "://" in url else f"{scheme}://{url}").rstrip("/")
    if token.fingerprint and not url.startswith("https://"):
        raise TokenError(
            f"the token is for a server that speaks HTTPS, and {url} does not begin with https://"
        )
    if not token.fingerprint and url.startswith("https://"):
        raise TokenError(
            f"the token names no certificate by which to know {url}; make one with `ravnest token "
            "create` on the server that speaks HTTPS"
        )
    if not token.fingerprint and not is_loopback(url):
        raise TokenError(
            f"the token is for a server on the machine that made it, and {url} is another machine; "
            "start that server with `ravnest serve --host 0.0.0.0` and make a new token there"
        )
    return url


def _authority(url: str, fingerprint: str, transport: httpx.BaseTransport | None) -> str:
    """The certificate of the server's authority, which the token's fingerprint vouches for."""
    pem = _unverified(url, transport)
    try:
        der = ssl.PEM_cert_to_DER_cert(pem)
    except ValueError as error:
        raise ServerError(f"what {url} calls its authority is not a certificate") from error
    if not secrets.compare_digest(hashlib.sha256(der).hexdigest(), fingerprint):
        raise NotAServerError(
            f"the certificate of {url} is not the one that the token names: it is another server, or "
            "the token is of an earlier one"
        )
    return ssl.DER_cert_to_PEM_cert(der)


def _unverified(url: str, transport: httpx.BaseTransport | None) -> str:
    """The one request that needs no trust: its answer is compared with the token."""
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
                raise ServerError(f"what {url} calls its authority is too long")
    return pem.decode("ascii", "replace")


def home() -> Path:
    """Where a user's servers are remembered."""
    found = os.environ.get(HOME_VARIABLE)
    return Path(found) if found else Path.home() / ".config" / "ravnest"


def memberships(folder: Path | None = None) -> tuple[Membership, ...]:
    """All that were saved."""
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
    """Remember a membership in place of an earlier one of the same server, role and name."""
    with _locked(folder or home()) as path:
        kept = [other for other in memberships(path.parent) if _key(other) != _key(membership)]
        _write(path, [*kept, membership])


def forget(membership: Membership, folder: Path | None = None) -> None:
    """Remember a membership no longer."""
    with _locked(folder or home()) as path:
        _write(path, [other for other in memberships(path.parent) if _key(other) != _key(membership)])


def find(
    url: str, roles: Sequence[ApiRole], name: str | None = None, folder: Path | None = None
) -> Membership | None:
    """The newest membership of a server in the first of these roles that there is one of."""
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
    """The file, while no other process changes it: several providers may join at once."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / f".{_FILE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder / _FILE


def _write(path: Path, members: Sequence[Membership]) -> None:
    """Atomically, and never readable by others, not even for a moment."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    listed = [{**asdict(member), "role": member.role.value} for member in members]
    try:
        temporary.touch(mode=0o600, exist_ok=False)
        temporary.write_text(json.dumps({"servers": listed}, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
