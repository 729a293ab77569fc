"""What some model types want and this machine has not."""

from collections.abc import Iterator

import pytest

from tools.model_types.stand_ins import stand_ins


@pytest.fixture(autouse=True)
def stood_in(uncompiled: None) -> Iterator[None]:
    with stand_ins():
        yield
