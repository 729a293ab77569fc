"""What becomes of a request with a model: its chat template or none, its own sampling, and what it cannot serve."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from coordinator.cli.generate import GenerateOptions, Prepared, how_drawn, prepare
from coordinator.cluster.options import cluster_options
from coordinator.sessions.request import RequestSpec
from tests.cluster.models import END, VOCAB, make_talker, reconfigured_copy
from worker.errors import InputError, ModelError

PROMPT = "The quick brown fox"
SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("prepare") / "model")


@pytest.fixture
def base(folder: Path) -> Iterator[Path]:
    """The same model while it has no chat template."""
    settings = folder / "tokenizer_config.json"
    before = settings.read_text()
    settings.write_text(json.dumps({k: v for k, v in json.loads(before).items() if k != "chat_template"}))
    yield folder
    settings.write_text(before)


def prepared(model: Path, **asked: Any) -> Prepared:
    if "prompt_tokens" not in asked:
        asked = {"prompt": PROMPT} | asked
    spec = RequestSpec((), 256, asked.pop("sampling", {}), ignore_eos=asked.pop("ignore_eos", False))
    return asyncio.run(prepare(GenerateOptions(**asked, spec=spec), cluster_options(None, str(model), 0)))


def ids(model: Path, text: str) -> tuple[int, ...]:
    return tuple(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids)


def test_a_prompt_goes_through_the_chat_template(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = prepared(folder, system="Be brief.").request.prompt
    assert found == ids(folder, f"system: Be brief.\nuser: {PROMPT}\nassistant: ")
    assert capsys.readouterr() == ("", "")


def test_a_base_model_gets_the_text_as_it_stands_with_a_note(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepared(base).request.prompt == ids(base, PROMPT)
    out, err = capsys.readouterr()
    assert out == "" and err == "note: this model has no chat template; the prompt is given as it stands\n"
    for asked in ({"raw": True}, {"prompt_tokens": (5, 6)}):  # no template was expected
        prepared(base, **asked)
        assert capsys.readouterr() == ("", "")
    with pytest.raises(InputError) as refused:
        prepared(base, system="Be brief.")
    assert refused.value.field == "system_prompt"


def test_a_model_is_sampled_as_its_makers_say_but_for_flags(folder: Path) -> None:
    def found(config: dict[str, Any], **sampling: float) -> tuple[float, float, int, str]:
        (folder / "generation_config.json").write_text(json.dumps(config))
        task = prepared(folder, sampling={"seed": 3} | sampling)
        drawn = task.request.sampling
        return drawn.temperature, drawn.top_p, drawn.top_k, how_drawn(drawn, task.own_sampling)

    *own, told = found(SAMPLED)
    assert own == [0.6, 0.95, 20] and told == (
        "sampled as the model's generation_config.json says (temperature 0.6, top_p 0.95, top_k 20), --seed 3"
    )
    *own, told = found(SAMPLED, temperature=0.9, top_k=0)
    assert own == [0.9, 0.95, 0] and "(top_p 0.95)" in told
    assert found(SAMPLED, temperature=0)[0] == 0
    assert found({}, temperature=0.7)[3] == "sampled at --temp 0.7, --seed 3"
    with pytest.raises(ModelError, match=r"generation_config\.json: top_p: expected a number from 0 to 1, got 3"):
        found(SAMPLED | {"top_p": 3})
    *own, told = found({})
    assert (own[0], told) == (0, ""), "greedy unless they say so"


def test_an_answer_ends_where_tokenizer_configuration_or_its_text_part_say(folder: Path, tmp_path: Path) -> None:
    """Vision checkpoints say it in `text_config`."""
    model = reconfigured_copy(folder, tmp_path / "model", eos_token_id=7, text_config={"eos_token_id": [8, 9]})
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 10]}))
    assert prepared(model).request.eos == {END, 7, 8, 9, 10}
    assert prepared(model, ignore_eos=True).request.eos == frozenset()


def test_prompts_are_blamed_by_the_name_under_which_they_were_given(folder: Path) -> None:
    for asked, field in (
        ({"prompt_tokens": (1, VOCAB)}, "prompt_tokens"), ({"prompt": " \n"}, "prompt"),
        ({"prompt": "", "raw": True}, "prompt"),
    ):  # fmt: skip
        with pytest.raises(InputError) as refused:
            prepared(folder, **asked)
        assert refused.value.field == field
