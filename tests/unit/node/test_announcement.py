"""What is taken for an announcement: what a node would send, and nothing that could be more than text."""

from hypothesis import given
from hypothesis import strategies as st

from worker.node.announce import MAX_NAME, About

SOUND = {"name": "mini", "version": "0.1.0", "process": "0a1b2c3d", "fingerprint": "ab" * 32}


def of_txt(**changed: str) -> About | None:
    said = SOUND | changed
    return About.of_txt({key.encode(): value.encode() for key, value in said.items()})


def test_what_a_node_says_is_understood_and_anything_else_is_no_announcement() -> None:
    for about in (About("mini", "0.1.0", "0a1b2c3d"), About("a.b_c-9", "0.2.0rc1+x", "00000000", "ab" * 32)):
        txt = {key.encode(): value.encode() for key, value in about.to_txt().items()}
        assert About.of_txt(txt) == about
        assert about.invalid_field is None
    for changed in (
        {"name": ""}, {"name": "mini\n"}, {"name": "\x1b[31mmini"}, {"name": "mini\u202e"},
        {"name": "mini: {address: x}"}, {"name": "m" * (MAX_NAME + 1)}, {"version": "0.1.0\r\n"}, {"version": ""},
        {"process": "0a1b2c3d0a1b2c3d"}, {"fingerprint": "AB" * 32}, {"fingerprint": "ab" * 31},
    ):  # fmt: skip
        assert of_txt() is not None
        assert of_txt(**changed) is None, changed
    assert About.of_txt({}) is None
    assert About.of_txt({b"name": None, b"version": b"0.1.0", b"process": b"0a1b2c3d"}) is None


@given(st.dictionaries(st.sampled_from([key.encode() for key in SOUND]), st.binary(max_size=255)))
def test_whatever_comes_is_refused_or_plain(properties: dict[bytes, bytes | None]) -> None:
    about = About.of_txt(properties)
    assert about is None or all(part.isascii() and part.isprintable() for part in about.to_txt().values())
