"""What unit tests share."""

from collections.abc import Iterator

import mlx.core as mx
import pytest
from hypothesis import settings

settings.register_profile("long", max_examples=10_000)  # pytest tests/unit -k fuzz --hypothesis-profile=long


@pytest.fixture(scope="module")
def uncompiled() -> Iterator[None]:
    """mlx-lm's filters are compiled anew for every parameter; on a CPU that takes a second each."""
    mx.disable_compile()
    yield
    mx.enable_compile()
