"""SshPlace: where ssh finds an account, as cluster.yaml names it. None looks like an option."""

import re
from typing import Annotated

from pydantic import AfterValidator

_USER = r"[A-Za-z0-9_][A-Za-z0-9._+-]*@"
_HOST = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_IPV6 = r"[0-9A-Fa-f]{0,4}(:[0-9A-Fa-f]{0,4}){2,7}(%[A-Za-z0-9]+)?"


def check_ssh_place(place: str) -> str:
    """Raises ValueError for what ssh could take for something else than an account."""
    if not re.fullmatch(rf"({_USER})?({_HOST}|{_IPV6})", place):
        raise ValueError("USER@HOST, or a host of your ssh configuration, which may hold a port too")
    return place


SshPlace = Annotated[str, AfterValidator(check_ssh_place)]
