"""A certificate for TLS, made once."""

from __future__ import annotations

import pytest

from tests.support.certificates import make_certificate


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(certificate, private key) of localhost."""
    return make_certificate(tmp_path_factory.mktemp("tls"))
