"""The table of what fits where: budgets as workers report them, plans as the planner makes them."""

import pytest

from coordinator.planning.plan import plan
from tools.plan_table import cell, main, nodes_of
from worker.errors import InputError
from worker.model.modelspec import LayerSpec, ModelSpec
from worker.process.machine import budget_from

GIB = 2**30


def spec(layer_gib: int) -> ModelSpec:
    layers = (LayerSpec(layer_gib * GIB, cache_per_token=1024),) * 10
    return ModelSpec("big", "llama", layers, 0, 0, tied=False, hidden_size=64, vocab_size=96, context=4096, dtype=3)


def test_a_mac_has_the_budget_that_its_worker_would_report() -> None:
    (mac,) = nodes_of((64,))
    assert mac.memory_bytes == budget_from({"max_recommended_working_set_size": 48 * GIB}, available=0)


def test_a_cell_says_the_split_or_what_is_missing() -> None:
    macs = nodes_of((64, 64))  # 43.2 GiB each
    assert cell(plan(spec(8), macs, 1024)) == "5+5"
    assert cell(plan(spec(9), macs, 1024)) == "lacks 3.6 GiB"


def test_the_table_has_a_row_per_model_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    main(["Llama-3.3-70B", "Llama-3.1-405B"], context=16384)
    _, _, small, large = capsys.readouterr().out.splitlines()
    assert small == "| Llama-3.3-70B | 40 | 80 | 41+39 | 41+39 | 20+20+21+19 | ai-dynamo/aiconfigurator |"
    assert large.startswith("| Llama-3.1-405B | 228 | 126 | lacks ")


def test_a_model_without_a_file_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"expected one of .*GLM-5.*, got 'GLM-9'"):
        main(["GLM-9"], context=16384)
