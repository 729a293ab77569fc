"""What `serve` refuses before it begins."""

import pytest

from coordinator.api.serve import ServeOptions
from worker.errors import InputError


@pytest.mark.parametrize("origin", ["nope", "https://a.example/", "https://A.example", "a.example:80", "https://", ""])
def test_an_origin_that_no_browser_names_is_refused(origin: str) -> None:
    with pytest.raises(InputError, match=r"^cors_origin: expected an origin as browsers write it"):
        ServeOptions("127.0.0.1", 0, cors_origins=[origin]).check()


def test_names_and_origins_that_requests_bring_are_taken() -> None:
    origins = ["https://a.example", "http://localhost:3000", "http://[::1]:80", "app://obsidian.md", "null", "*"]
    ServeOptions("127.0.0.1", 0, cors_origins=origins, names=["gpt-4"]).check()


@pytest.mark.parametrize("name", ["", " "])
def test_a_name_that_says_nothing_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"^served_model_name: expected a name, found none"):
        ServeOptions("127.0.0.1", 0, names=["gpt-4", name]).check()
