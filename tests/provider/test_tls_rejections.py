"""Lines of gRPC's log about rejected connections."""

from __future__ import annotations

import pytest

from ravnest.provider.tls_rejections import RejectionKind, is_log_line, rejection_kind

_HEAD = "I1116 08:33:03.250672   25396 ssl_transport_security.cc:2563] "
_FAILED = f"{_HEAD}Handshake failed with error SSL_ERROR_SSL: error:1000007d:SSL routines:"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (f"{_FAILED}CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate\n", "foreign"),
        (f"{_FAILED}PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid certificate\n", "bare"),
        (f"{_FAILED}WRONG_VERSION_NUMBER: Invalid certificate\n", "plain"),
        (f"{_FAILED}HTTP_REQUEST: Invalid certificate\n", "plain"),
        (f"{_FAILED}SOMETHING_ELSE: Invalid certificate\n", None),
        ("RunError: CERTIFICATE_VERIFY_FAILED\n", None),
        ("", None),
    ],
)
def test_the_kind_of_connection_is_recognised(line: str, kind: RejectionKind | None) -> None:
    assert rejection_kind(line) == kind


def test_only_grpc_lines_below_the_error_level_are_log_lines() -> None:
    assert is_log_line(f"{_HEAD}anything\n")
    assert is_log_line(f"W{_HEAD[1:]}Log level INFO is not suitable for production.\n")
    assert not is_log_line(f"E{_HEAD[1:]}it broke\n")
    assert not is_log_line("I am not a line of gRPC\n")
    assert not is_log_line("RunError: node_1 is gone\n")
