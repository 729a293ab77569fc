"""generation_config.json: where answers end, and how the model's makers want it sampled, if they do."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.sessions.request import eos_ids, sampling_defaults
from worker.errors import ModelError
from worker.model.checkpoint import DEMO, Checkpoint


def bare(folder: Path) -> Checkpoint:
    return Checkpoint("", folder, {}, {})


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
def test_its_sampling_counts_if_the_model_is_sampled(config: dict[str, Any], expected: dict[str, float]) -> None:
    assert sampling_defaults(config) == expected


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, {2}),
        ({"eos_token_id": [1, 2]}, None, {1, 2}),
        ({"eos_token_id": 0}, None, {0}),
        ({"eos_token_id": 2}, {"eos_token_id": 3}, {2, 3}),
        ({"eos_token_id": 2}, {"eos_token_id": [3, 106]}, {2, 3, 106}),
        ({"eos_token_id": [1]}, {}, {1}),
        ({"text_config": {"eos_token_id": 7}}, None, {7}),
        ({"eos_token_id": 1, "text_config": {"eos_token_id": [7, 8]}}, {"eos_token_id": 9}, {1, 7, 8, 9}),
        ({"eos_token_id": None, "text_config": {}}, {"eos_token_id": None}, set()),
        ({"text_config": None, "eos_token_id": 4}, None, {4}),
        ({"text_config": ["text"], "eos_token_id": 4}, None, {4}),
        ({}, None, set()),
    ],
)
def test_all_ids_of_ends_count(config: dict[str, Any], generation: dict[str, Any] | None, expected: set[int]) -> None:
    assert eos_ids(config, generation or {}) == expected


@pytest.mark.parametrize("value", ["x", 2.5, [1, "x"], {"id": 2}])
def test_an_end_that_is_no_token_is_refused(value: Any) -> None:
    for places, file in (
        (({"eos_token_id": value}, {}), "config"),
        (({}, {"eos_token_id": value}), "generation_config"),
    ):
        with pytest.raises(ModelError, match=rf"^{file}\.json: eos_token_id: expected a token id"):
            eos_ids(*places)


def test_the_file_may_be_missing_but_not_damaged_or_of_other_types(tmp_path: Path) -> None:
    assert sampling_defaults(bare(DEMO).generation_config) == {}, "the bundled model is greedy"
    assert bare(tmp_path).generation_config == {}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True}))
    assert bare(tmp_path).generation_config == {"do_sample": True}
    for content in (b"{", b"[]", b"\xff\xfe{}", b""):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            sampling_defaults(bare(tmp_path).generation_config)
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        for value in ("hot", [1], True, *([2.5] if name == "top_k" else [])):
            with pytest.raises(ModelError, match=rf"generation_config\.json: {name}: expected a"):
                sampling_defaults({"do_sample": True, name: value})
