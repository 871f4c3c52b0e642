"""What gRPC says about connections that it refused, read."""

from __future__ import annotations

import pytest

from ravnest.provider.tls_rejections import Kind, is_logged, kind_of

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
def test_who_was_refused(line: str, kind: Kind | None) -> None:
    assert kind_of(line) == kind


def test_only_lines_of_grpc_that_are_no_errors_are_not_kept() -> None:
    assert is_logged(f"{_HEAD}anything\n")
    assert is_logged(f"W{_HEAD[1:]}Log level INFO is not suitable for production.\n")
    assert not is_logged(f"E{_HEAD[1:]}it broke\n")
    assert not is_logged("I am no line of gRPC\n")
    assert not is_logged("RunError: node_1 is gone\n")
