"""Certificates for servers with TLS."""

from __future__ import annotations

from pathlib import Path

import trustme


def write_certificates(folder: Path) -> trustme.CA:
    """Write ca.pem, and chain.pem and key.pem for localhost, into a folder; returns the authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(folder / "chain.pem", append=True)
    return authority
