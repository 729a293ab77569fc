"""Callers: what the certificate of whoever calls this node says."""

from dataclasses import dataclass

import grpc.aio

from worker.errors import ConfigError

_VERSION = b"TLSv1.3"


@dataclass(frozen=True)
class Caller:
    """Names and roles in a certificate that the handshake has found to be of our authority."""

    names: tuple[str, ...]
    roles: tuple[str, ...]

    @classmethod
    def of(cls, context: grpc.aio.ServicerContext) -> "Caller":
        """Raises ConfigError if the connection is not encrypted as it has to be: grpcio cannot refuse it earlier."""
        said = context.auth_context()
        [version] = said.get("ssl_tls_version", (b"none",))
        if version != _VERSION:
            raise ConfigError(f"expected a connection by {_VERSION.decode()}, got one by {version.decode()}")
        names, roles = ([text.decode() for text in said.get(key, ())] for key in ("peer_dns", "peer_uri"))
        return cls(tuple(names), tuple(roles))

    def __str__(self) -> str:
        return f"the certificate of {', '.join(self.names) or 'nobody by name'} ({', '.join(self.roles) or 'no role'})"
