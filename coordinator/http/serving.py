"""Serving: how a server listens and whom it lets in, and what is refused of it before it begins."""

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.cluster.progress import say
from coordinator.http.keys import Keys
from coordinator.http.served import RequestLimits
from worker.config import is_loopback
from worker.errors import InputError

_ORIGIN = r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+"  # without a path, not even a slash; in small letters
_REOPEN_S = 5.0  # after no chain could be opened for as long as a recovery may take


@dataclass(frozen=True)
class Serving:
    """How the server listens, whom it lets in, and how long anything may take."""

    host: str
    port: int
    keys: Keys | None = None
    insecure: bool = False
    allowed_hosts: Sequence[str] = ()  # names that it is called by, beyond those of this machine
    cors_origins: Sequence[str] = ()  # of web pages that may use it
    names: Sequence[str] = ()
    context: int | None = None  # tokens; None: as many as there is memory for
    max_waiting: int = 256
    shutdown_timeout_s: float = 30.0
    reopen_s: float = _REOPEN_S
    keep_alive_s: float | None = None  # how long the model is held while nobody asks; None: for ever
    tls: ssl.SSLContext | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)
    sampling: Mapping[str, Any] = field(default_factory=dict)  # for requests that do not say; above the model's own

    @property
    def is_wide(self) -> bool:
        """Whether other machines can reach it."""
        return not is_loopback(self.host)

    @property
    def hosts(self) -> Sequence[str]:
        """Names by which it may be called; none: by any."""
        if self.is_wide and not self.allowed_hosts:
            return ()
        return ("localhost", "127.0.0.1", "::1", self.host.lower(), *(name.lower() for name in self.allowed_hosts))

    def url(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{port}"


def require_reachable(serving: Serving) -> None:
    """Raises InputError for names and origins that no request can bring."""
    if "" in [name.strip() for name in serving.names]:
        raise InputError("served_model_name", "expected a name, found none")
    for origin in serving.cors_origins:
        if origin not in ("*", "null") and not re.fullmatch(_ORIGIN, origin):
            raise InputError(
                "cors_origin",
                f"expected an origin as browsers write it, such as https://example.org:8080, got {origin!r}",
            )


def require_guarded(serving: Serving) -> None:
    """Raises InputError for a server that anybody in the network could use."""
    if serving.is_wide and serving.keys is None and not serving.insecure:
        raise InputError(
            "host", f"{serving.host} can be reached by others: expected --api-key-file with it, or --insecure"
        )
    if serving.is_wide and serving.tls is None:
        what = "prompts, answers and keys" if serving.keys else "prompts and answers"
        say(f"warning: {what} travel in clear; give --tls-cert and --tls-key to encrypt them")
