"""Lines of the log about rejected connections."""

from __future__ import annotations

import io
import ssl

import pytest

from ravnest.transport.tls_rejections import (
    RejectionKind,
    logger,
    rejection_kind,
    report_rejection,
    tls_reason,
    write_rejections,
)


def failed(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}]")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("CERTIFICATE_VERIFY_FAILED", "foreign"),
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "bare"),
        ("WRONG_VERSION_NUMBER", "plain"),
        ("HTTP_REQUEST", "plain"),
        ("SOMETHING_ELSE", None),
    ],
)
def test_the_line_of_a_rejection_is_recognised(reason: str, kind: RejectionKind | None) -> None:
    stream = io.StringIO()
    write_rejections(stream)
    try:
        report_rejection(failed(reason), "192.0.2.7")
    finally:
        logger.removeHandler(logger.handlers[-1])
    assert rejection_kind(stream.getvalue()) == kind


@pytest.mark.parametrize(
    "line", ["", "RunError: CERTIFICATE_VERIFY_FAILED\n", "rejected a connection from : it is new"]
)
def test_other_lines_are_no_rejections(line: str) -> None:
    assert rejection_kind(line) is None


def test_the_side_that_dialled_learns_that_it_was_rejected() -> None:
    reason = tls_reason(failed("TLSV13_ALERT_CERTIFICATE_REQUIRED"))
    assert "rejects this node's certificate" in reason
