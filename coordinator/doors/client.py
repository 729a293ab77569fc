"""Client: how every command asks a server over HTTP: whom it trusts, and what it says where nothing answers."""

import os
import ssl
from typing import Any

import httpx2

from worker.errors import InputError, ServerFailed

_CERTIFICATES = "SSL_CERT_FILE"
_OTHER_HOST = (62, 64)  # OpenSSL's codes of a host and of an IP address that a certificate is not for


class NothingAnswers(ServerFailed):
    """Nobody is there who could."""


def client_settings(url: str, key: str | None) -> dict[str, Any]:
    """What a client of this server is made with, whether it is asynchronous or not.

    Raises:
        InputError: it is no URL of a server, or the file of certificates that are trusted cannot be read.
    """
    expected = f"expected http://HOST:PORT, got {url!r}"
    if not url.startswith(("http://", "https://")):
        raise InputError("server", expected)
    try:
        base = httpx2.URL(url.rstrip("/").removesuffix("/v1") + "/")
    except httpx2.InvalidURL as error:
        raise InputError("server", f"{expected} ({error})") from error
    return {
        "base_url": base,
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "verify": _trusted() if url.startswith("https://") else False,
        "trust_env": False,  # a node of ours is behind no proxy
    }


def no_answer(url: str, error: Exception, advice: str = "start a server by `brigade serve`") -> ServerFailed:
    """Why there is no answer from this server: its certificate is not trusted, or nobody is there: NothingAnswers."""
    untrusted = _untrusted(error)
    if untrusted and untrusted.verify_code in _OTHER_HOST:
        return ServerFailed(f"{untrusted.verify_message}: ask {url} by a name that its certificate has")
    if untrusted:
        return ServerFailed(
            f"the certificate of {url} is not trusted ({untrusted.verify_message}): if it is your own, let "
            f"{_CERTIFICATES} name its PEM file (--tls-cert of the server)"
        )
    return NothingAnswers(f"nothing answers at {url} ({str(error) or type(error).__name__}): {advice}")


def _trusted() -> ssl.SSLContext:
    try:
        return httpx2.create_ssl_context()  # knows the environment's variables for it
    except OSError as error:
        path = os.environ.get(_CERTIFICATES)
        raise InputError("", f"{_CERTIFICATES} names {path}, which holds no certificates ({error})") from error


def _untrusted(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error
        error = error.__cause__ or error.__context__
    return None
