"""What some model types want and this machine has not, and what it need not do for them."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from tools.model_types.stand_ins import stand_ins


@pytest.fixture(autouse=True)
def stood_in() -> Iterator[None]:
    with stand_ins():
        yield


@pytest.fixture(scope="package", autouse=True)
def uncompiled() -> Iterator[None]:
    """Where MLX has never run, a CPU compiles a hundred of mlx-lm's functions for them, half a second each."""
    mx.disable_compile()
    yield
    mx.enable_compile()
