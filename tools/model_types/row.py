"""One row of docs/models.md."""

from dataclasses import dataclass, field

EQUAL, CLOSE = "=", "≈"
MISSING = "not in mlx-lm: "  # this mlx-lm does not run it here


@dataclass
class Row:
    """What was found of one type. `=` is equal to the last bit, `≈` within rounding; all else says what it is."""

    type: str
    fits: str = ""  # at every boundary
    bf16: str = ""
    caches: str = ""  # mlx-lm's own, by kind
    cut: str = ""
    lanes: str = ""
    int8: str = ""
    rotating: str = ""
    quantised: dict[str, str] = field(default_factory=dict)
    calls: int = 0  # how often eight sessions read a matrix in a step that one session reads once

    @property
    def is_cut(self) -> bool:
        return self.fits == EQUAL

    @property
    def is_missing(self) -> bool:
        return self.fits.startswith(MISSING)
