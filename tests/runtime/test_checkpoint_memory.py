"""Memory that checkpoints take: it is not planned, so it must fit into what plans leave for buffers."""

from __future__ import annotations

from ravnest.provider.limits import BUFFERS
from ravnest.runtime.control.recent_records import MOST_RECENT, encoded_records
from ravnest.runtime.control.state_blocks import BLOCK
from ravnest.store import files
from ravnest.telemetry import LossRecord
from ravnest.transport import acknowledgements, frame_socket, tls_channel

LINKS = 2
"""Links to neighbours, from each of which a replica may arrive."""


def test_checkpoints_take_less_than_half_of_what_is_left_for_buffers() -> None:
    """Tensors are written from the memory of the stage, so that the size of the state does not count."""
    tls = tls_channel._SEALED_BYTES + tls_channel._RECEIVED_BYTES
    # The receive buffer of a link, and the block in it as a tensor.
    received = LINKS * (frame_socket._KEPT_BYTES + tls + BLOCK)
    # A block as it is read and as a tensor, and what the peer has not acknowledged.
    sent = 2 * BLOCK + acknowledgements.ACK_BYTES + BLOCK
    record = LossRecord(10**9, 10**6, 1 / 3, 10**3, 10**3, 1 / 3)
    manifest = 4 * len(encoded_records([record] * MOST_RECENT))
    assert received + sent + files._CHUNK + manifest < BUFFERS / 2
