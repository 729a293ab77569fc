"""What `serve` refuses before it begins, and what it says once it has."""

import pytest

from coordinator.http.run import Serving, require_reachable, room_said
from worker.errors import InputError


@pytest.mark.parametrize("origin", ["nope", "https://a.example/", "https://A.example", "a.example:80", "https://", ""])
def test_an_origin_that_no_browser_names_is_refused(origin: str) -> None:
    with pytest.raises(InputError, match=r"^cors_origin: expected an origin as browsers write it"):
        require_reachable(Serving("127.0.0.1", 0, cors_origins=[origin]))


def test_names_and_origins_that_requests_bring_are_taken() -> None:
    origins = ["https://a.example", "http://localhost:3000", "http://[::1]:80", "app://obsidian.md", "null", "*"]
    require_reachable(Serving("127.0.0.1", 0, cors_origins=origins, names=["gpt-4"]))


@pytest.mark.parametrize("name", ["", " "])
def test_a_name_that_says_nothing_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"^served_model_name: expected a name, found none"):
        require_reachable(Serving("127.0.0.1", 0, names=["gpt-4", name]))


@pytest.mark.parametrize(
    ("wished", "said"), [(None, "request"), (2048, "request"), (10**6, "request: the model has no room for 1000000")]
)
def test_a_context_beyond_the_models_is_told_as_such(wished: int | None, said: str) -> None:
    assert room_said(2048, wished) == f"up to 2048 tokens per {said}"
