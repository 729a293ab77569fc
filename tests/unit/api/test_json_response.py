"""What a model says may be no UTF-8."""

from coordinator.api.errors import JSONResponse


def test_half_of_a_character_is_sent_as_its_escape() -> None:
    assert JSONResponse({"say": "é\ud800"}).body == '{"say":"é\\ud800"}'.encode()
