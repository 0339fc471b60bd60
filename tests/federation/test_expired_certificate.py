"""A SuperLink whose certificate expires while it runs: whoever connects then is told so."""

import time

import pytest
from real_deployment import Deployment

from vfl.transport import session_certificate

pytestmark = pytest.mark.net

VALID_S = 30


@pytest.fixture
def expiring(tmp_path):
    """A deployment with certificates of a few seconds, and the moment they end."""
    made = Deployment(tmp_path / "project")
    certificate = session_certificate(["127.0.0.1"], days=VALID_S / 86400)
    ends = time.monotonic() + VALID_S
    folder = made.label.certificates
    for name, content in (
        ("ca.pem", certificate.ca_pem),
        ("server.pem", certificate.cert_pem),
        ("server.key", certificate.key_pem),
    ):
        (folder / name).write_bytes(content)
    for side in ("left", "right"):
        (made.folder / side / "ca.pem").write_bytes(certificate.ca_pem)
    try:
        made.start_superlink()
        yield made, ends
    finally:
        made.close()


def test_an_expired_certificate(expiring):
    deployment, ends = expiring
    time.sleep(max(0.0, ends - time.monotonic()) + 1)
    deployment.start_supernode("left")
    node, training = deployment.nodes["left"], deployment.train()
    assert node.wait() == 3
    assert "error[V404]: the certificate of the SuperLink is not accepted" in node.last_words()
    assert "certificate has expired" in node.last_words()
    assert training.wait() == 2
    assert "error[V001]: a certificate has expired" in training.last_words()
    assert deployment.superlink.stop() == 143
    again = deployment.command("superlink-again", "up", deployment.folder)
    assert again.wait() == 2
    assert "error[V001]: a certificate has expired" in again.last_words()
    assert str(deployment.label.certificates / "server.pem") in again.last_words()
