"""Tickets and access for tests of relays."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ravnest.relay.access import RelayAccess
from ravnest.relay.tickets import Endpoint, RelayTicket, sign_ticket
from ravnest.types import Address

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key()
LOOPBACK = Address("127.0.0.1", 0)


def ticket(node: int, *peers: int, job: str = "job-a", expires: float = 4e9) -> str:
    return sign_ticket(RelayTicket(job, node, peers, expires), KEY)


def access(node: int, peers: tuple[int, ...], *relays: Address, job: str = "job-a") -> RelayAccess:
    return RelayAccess(
        tuple((relay,) for relay in relays), Endpoint(job, node), ticket(node, *peers, job=job)
    )
