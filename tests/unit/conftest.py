"""What unit tests share."""

from hypothesis import settings

settings.register_profile("long", max_examples=10_000)  # pytest tests/unit -k fuzz --hypothesis-profile=long
