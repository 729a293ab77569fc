"""What a node announces of itself, and what may be taken for an announcement. A hint: nobody is trusted for it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from worker.config import is_node_name

SERVICE = "_brigade._tcp.local."
LONGEST_NAME = 128  # characters; a TXT record's string has 255
_VERSION = r"[0-9A-Za-z.+!_-]{1,64}"
_FINGERPRINT = r"[0-9a-f]{64}|"
_PROCESS = r"[0-9a-f]{8}"
_KEYS = ("name", "version", "process", "fingerprint")


@dataclass(frozen=True)
class About:
    """A node's name, its version of brigade, and its certificate."""

    name: str
    version: str
    process: str  # random: on each interface a node is announced by itself
    fingerprint: str = ""  # SHA-256 of the certificate, hex; empty where its links are not encrypted

    @property
    def unsound(self) -> str | None:
        """The first part of it that could be more than text to a terminal or a file."""
        is_sound = {
            "name": len(self.name) <= LONGEST_NAME and is_node_name(self.name),
            "version": re.fullmatch(_VERSION, self.version),
            "process": re.fullmatch(_PROCESS, self.process),
            "fingerprint": re.fullmatch(_FINGERPRINT, self.fingerprint),
        }
        return next((key for key in _KEYS if not is_sound[key]), None)

    def to_txt(self) -> dict[str, str]:
        """As the properties of a TXT record."""
        said = {"name": self.name, "version": self.version, "process": self.process}
        return said | ({"fingerprint": self.fingerprint} if self.fingerprint else {})

    @classmethod
    def of_txt(cls, properties: Mapping[bytes, bytes | None]) -> "About | None":
        """What anybody in the network may have sent; None unless every part of it is what a node would send."""
        try:
            said = cls(**{key: (properties.get(key.encode()) or b"").decode("ascii") for key in _KEYS})
        except UnicodeDecodeError:
            return None
        return None if said.unsound else said
