"""What is said of a model once it is loaded."""

import pytest

from coordinator.http.life import room_said


@pytest.mark.parametrize(
    ("wished", "said"), [(None, "request"), (2048, "request"), (10**6, "request: the model has no room for 1000000")]
)
def test_a_context_beyond_the_models_is_told_as_such(wished: int | None, said: str) -> None:
    assert room_said(2048, wished) == f"up to 2048 tokens per {said}"
