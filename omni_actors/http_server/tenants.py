"""Names for this server's clients, among which its share of the pipeline's slots is divided (docs/decisions.md)."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets

IPV6_NETWORK = 64  # bits; who has one of its addresses usually has them all


class TenantNames:
    """Tells clients apart by address, without telling the pipeline the address."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def name(self, host: str) -> str:
        """Return 16 hexadecimal digits for the address of a connection, "" for none."""
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return ""
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or ipaddress.ip_network((address, IPV6_NETWORK), strict=False).network_address
        return hashlib.blake2b(address.packed, digest_size=8, key=self._secret).hexdigest()
