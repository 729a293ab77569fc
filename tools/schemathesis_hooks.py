"""What schemathesis has to know to get beyond refusals. Needs nothing but schemathesis.

`tools.check_openapi` names this file to it; it may run in an environment without Brigade's own packages.
"""

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis

_KEPT = 0.08  # of the fields that may be left out: with all of them nothing is ever accepted
_TURNS = [{"role": "user", "content": "Hello"}]
_PROMPTS = {"prompt": "Hello", "prompt_tokens": [5, 6], "messages": _TURNS, "input": "Hello"}  # one has to be there
_USAGE = {"stream_options": {"include_usage": True}}
_VARIANTS: tuple[dict[str, Any], ...] = (  # what answers look different with; each body takes what it knows
    {}, {"stream": True}, {"stream": True, **_USAGE, "n": 2, "brigade": {"waterfall": True, "fills": True}},
    {"logprobs": 2, "echo": False}, {"logprobs": True, "top_logprobs": 2, "stream": True}, {"echo": True, "n": 2},
    {"response_format": {"type": "json_object"}}, {"text": {"format": {"type": "json_object"}}, "decode": "ar"},
)  # fmt: skip
_COUNTED, _MOST = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"), 3  # and no more of those
_MODEL = os.environ["BRIGADE_MODEL"]
_COUNTS = Path(os.environ["BRIGADE_COUNTS"])
_counts: Counter[str] = Counter()


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """With the model that there is, often a prompt that can be answered, few of the other fields, and little to do."""
    if not isinstance(body, dict):
        return body
    rng = random.Random(repr(body))
    shape = _body_shape(context.operation)
    known = [name for name in _PROMPTS if name in shape["properties"]]
    prompt = {name: rng.choice([body.get(name), _PROMPTS[name]]) for name in rng.sample(known, min(1, len(known)))}
    needed = shape.get("required", ())
    kept = {name: value for name, value in body.items() if name in needed or rng.random() < _KEPT}
    added = {name: value for name, value in rng.choice(_VARIANTS).items() if name in shape["properties"]}
    short = {name: min(value, _MOST) for name, value in kept.items() if name in _COUNTED and type(value) is int}
    return kept | prompt | added | short | ({"model": _MODEL} if rng.random() > _KEPT else {})


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Every second time the model's name."""
    if not path_parameters:
        return path_parameters
    is_real = random.Random(repr(path_parameters)).random() < 0.5
    return dict.fromkeys(path_parameters, _MODEL) if is_real else path_parameters


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Count statuses by operation; a stream's as those of another one."""
    kind = " (stream)" if _is_stream(response) else ""
    _counts[f"{case.operation.label}{kind}: {response.status_code}"] += 1
    _COUNTS.write_text(json.dumps(_counts), encoding="utf-8")


def _body_shape(operation: Any) -> dict[str, Any]:
    document = operation.schema.raw_schema
    body = document["paths"][operation.path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    shape: dict[str, Any] = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    return shape


def _is_stream(response: Any) -> bool:
    return bool(any(kind.startswith("text/event-stream") for kind in response.headers.get("content-type", [])))
