"""What a peer is told of this node's models."""

from pathlib import Path

import pytest

from worker.node.own_models import OwnModels


@pytest.mark.parametrize("models", [OwnModels("/srv/my models/tiny"), OwnModels(roots=(Path("/srv/my models"),))])
def test_a_peer_is_not_told_where_a_model_is(models: OwnModels) -> None:
    said = models.without_paths("/srv/my models/tiny/config.json is not valid JSON")
    assert said == "tiny/config.json is not valid JSON"


def test_a_peer_is_not_told_whose_home_it_is() -> None:
    said = OwnModels("demo").without_paths(f"{Path.home()}/.cache/hub/x is cut short")
    assert said == "~/.cache/hub/x is cut short"
