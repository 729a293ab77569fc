"""A question with its answer, and the rule that keeps some of them out of training. No MLX, no I/O."""

import zlib
from typing import NamedTuple

HELD_OUT_ONE_IN = 40


DRAFTER_HELD_OUT_ONE_IN = 6


class Turn(NamedTuple):
    """One exchange. The answer follows from the prompt alone: the same prompt always has the same answer."""

    kind: str
    prompt: str
    answer: str
    family: str = ""  # the template of the answer, where a kind has several

    @property
    def is_new_to_drafter(self) -> bool:
        """Whether the drafter never saw an answer of this template: one in `DRAFTER_HELD_OUT_ONE_IN`."""
        return bool(self.family) and zlib.crc32(self.family.encode()) % DRAFTER_HELD_OUT_ONE_IN == 0


def is_held_out(key: str) -> bool:
    """Say whether what `key` names is kept for evaluation: one key in `HELD_OUT_ONE_IN`, the same ones for ever."""
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0
