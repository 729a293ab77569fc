"""`GET /`: one page that shows the chain at work. It loads nothing else, and may ask nobody but this server."""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

_PAGE = (files("coordinator.http") / "page.html").read_text(encoding="utf-8")


async def page(request: Request) -> Response:
    """Open to everybody: what it shows it asks for with the reader's own key."""
    return HTMLResponse(_PAGE, headers=_HEADERS)


def policy_of(html: str) -> str:
    """What a browser may run of this page: its own script and style, by their digests."""
    script, style = (_digests(html, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digests(html: str, tag: str) -> str:
    bodies = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


_HEADERS = {
    "Content-Security-Policy": policy_of(_PAGE),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
