"""generation_config.json: how the model's makers want it sampled, if they do."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.sessions.generation_config import read_generation_config, sampling_defaults
from worker.errors import ModelError
from worker.model.checkpoint import DEMO


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8}, {}),
        ({"temperature": 0.7, "top_p": 0.8}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05},
        ),
        ({"do_sample": True, "top_p": 1.0, "repetition_penalty": 1}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": None, "max_length": 9}, {"temperature": 1.0}),
    ],
)
def test_its_sampling_counts_where_it_says_that_the_model_is_sampled(
    config: dict[str, Any], expected: dict[str, float]
) -> None:
    assert sampling_defaults(config) == expected


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", ["hot", [1], True])
def test_what_is_no_number_is_a_model_error_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {name}: expected a number"):
        sampling_defaults({"do_sample": True, name: value})


def test_half_a_token_is_no_number_of_tokens() -> None:
    with pytest.raises(ModelError, match="top_k"):
        sampling_defaults({"do_sample": True, "top_k": 2.5})


def test_a_folder_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True}))
    assert read_generation_config(tmp_path) == {"do_sample": True}


def test_the_bundled_model_is_greedy() -> None:
    assert sampling_defaults(read_generation_config(DEMO)) == {}
