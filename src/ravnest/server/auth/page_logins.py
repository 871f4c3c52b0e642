"""Logins of browsers on behalf of a member: links that work once, and signed cookies.

A requester who follows a link of its own sees its jobs: the cookie names the member and the time of its
end, and a key of this server signs it. It ends earlier with the credential of the member.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict

from ravnest.schemas.auth import hashed
from ravnest.server.folder import ServerFolder, write_private
from ravnest.server.settings import Clock

PREFIX = "page."
"""Start of the cookies, which no credential has."""
LINK_SECONDS = 600.0
_MOST_LINKS = 1000


class PageLogins:
    """Makes links and cookies, and checks them."""

    def __init__(self, folder: ServerFolder, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._links: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Members and ends of links by the hashes of their secrets; a restart forgets them."""
        self._known_key = b""

    def new_link(self, member: str) -> str:
        """Return a secret that logs a browser in as this member, once, within ``LINK_SECONDS``."""
        secret = secrets.token_urlsafe(32)
        with self._lock:
            self._links[hashed(secret)] = (member, self._clock.steady() + LINK_SECONDS)
            while len(self._links) > _MOST_LINKS:
                self._links.popitem(last=False)
        return secret

    def redeem(self, secret: str) -> str | None:
        """Return the member of a link, and forget the link; ``None`` if it is unknown or too old."""
        with self._lock:
            member, end = self._links.pop(hashed(secret), ("", 0.0))
        return member if member and end > self._clock.steady() else None

    def cookie(self, member: str, expires: float) -> str:
        """Return a cookie for a member that is valid until ``expires``."""
        body = f"{member}.{int(expires)}"
        return f"{PREFIX}{body}.{self._signature(body)}"

    def member_of(self, cookie: str) -> str | None:
        """Return the member of a cookie; ``None`` if it is not ours or has ended."""
        body, _, signature = cookie.removeprefix(PREFIX).rpartition(".")
        member, _, expires = body.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(body).encode()):
            return None
        return member if self._clock.wall() < int(expires) else None

    def _signature(self, body: str) -> str:
        return hmac.new(self._key(), body.encode(), hashlib.sha256).hexdigest()

    def _key(self) -> bytes:
        """Return the key; it is created when it is needed for the first time."""
        with self._lock:
            if not self._known_key:
                path = self._folder.page_key
                if not path.exists():
                    write_private(path, secrets.token_bytes(32))
                self._known_key = path.read_bytes()
            return self._known_key
