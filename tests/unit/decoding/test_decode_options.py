"""Which decoder and cache a request gets, and every reason to refuse one."""

import math
from dataclasses import replace
from typing import Any

import pytest

from coordinator.decoding.decode_options import KINDS, Decode, make_cache_choice, make_decode, suit
from coordinator.planning.costs import ChainCosts
from protos.brigade_pb2 import CACHE_FULL, CACHE_INT4, CACHE_INT8, CACHE_ROTATING, DTYPE_BFLOAT16, Cache
from worker.errors import InputError
from worker.model.cache_spec import Memory
from worker.model.model_spec import DraftHead, HeadKind, LayerSpec, ModelSpec

FULL = LayerSpec(100, (Memory(None, 1, 1, 1, 2),))
RECURRENT = LayerSpec(100, (Memory(state_arrays=1, state_bytes=10),))
DRAFTING = [kind for kind in KINDS if kind not in ("auto", "ar", "canvas")]
DIFFUSION = ["diffusion", "diffusion-fast"]


def spec(mask: int | None = 7, layers: tuple[LayerSpec, ...] = (FULL,) * 4, context: int = 100) -> ModelSpec:
    return ModelSpec("tiny", "qwen3", layers, 1, 1, False, 8, 16, context, DTYPE_BFLOAT16, mask)


def decode(
    kind: str = "ar", window: str = "auto", threshold: float = 0.4, penalty: float = 0.02, **canvas: Any
) -> Decode:
    return make_decode(kind, window=window, entropy_threshold=threshold, position_penalty=penalty, **canvas)


@pytest.mark.parametrize(
    ("text", "expected"), [("0.9", (0.9, 0.9, 1)), ("0.95,0.80,8", (0.95, 0.8, 8)), ("0,1,1", (0.0, 1.0, 1))]
)
def test_a_threshold_is_one_number_or_two_and_a_step(text: str, expected: tuple[float, float, int]) -> None:
    assert decode("canvas", canvas_threshold=text).canvas_threshold == expected


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("kind", ["magic", ""]),
        *(
            (name, ["0", "-4", "1.5", "", "many", "²", "9" * 20, "00000000130000000"])
            for name in ("window", "num_draft_tokens")
        ),
        ("threshold", [math.nan, math.inf, -0.1]),
        ("penalty", [math.nan, math.inf, -1.0]),
        ("canvas", [0]),
        ("canvas_steps", [-1]),
        ("conditioning", ["top-32"]),
        ("canvas_sampler", ["best"]),
        ("canvas_threshold", ["", "x", "0.9,0.8", "0.9,0.8,2.5", "0.9,0.8,0", "nan", "-1", "1,2,3,4", "inf"]),
    ],
)
def test_a_value_that_no_decoder_can_have_is_refused_by_the_name_of_its_parameter(field: str, values: list) -> None:
    names = {"kind": "decode", "threshold": "entropy_threshold", "penalty": "position_penalty"}
    for kind in KINDS:
        for value in values:
            with pytest.raises(InputError) as refusal:
                decode(**{"kind": kind} | {field: value})
            assert refusal.value.field == names.get(field, field)


OF_CANVASES: dict[str, Any] = {
    "canvas": 4, "canvas_steps": 2, "canvas_sampler": "entropy", "canvas_threshold": "0.9", "conditioning": "top-64"
}  # fmt: skip


OWNERS = {
    "window": ("auto", "diffusion", "diffusion-fast"), "num_draft_tokens": ("auto", "ngram", "draft"),
    "entropy_threshold": ("diffusion-fast",), "position_penalty": ("diffusion-fast",),
    **dict.fromkeys(OF_CANVASES, ("auto", "canvas")),
}  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        *OF_CANVASES.items(),
        *(("entropy_threshold", 0.3), ("position_penalty", 0.1), ("window", "4"), ("num_draft_tokens", "2")),
    ],
)
def test_a_parameter_of_another_decoder_is_refused(given: tuple[str, Any]) -> None:
    for kind in KINDS:
        if kind in OWNERS[given[0]]:
            assert make_decode(kind, **dict([given])).kind == kind
        else:
            with pytest.raises(InputError) as refusal:
                make_decode(kind, **dict([given]))
            assert refusal.value.field == given[0]


def test_auto_takes_a_parameter_of_canvases_only_where_it_stands_for_canvas() -> None:
    for field, value in OF_CANVASES.items():
        with pytest.raises(InputError) as refusal:
            suit(decode("auto", **{field: value}), Cache(), spec())
        assert refusal.value.field == field


@pytest.mark.parametrize(
    ("kind", "has_drafts", "has_masks"),
    [("ar", False, False), ("ngram", True, False), ("diffusion", False, True), ("diffusion-fast", False, True)],
)
def test_each_kind_makes_a_decoder_of_its_own_for_every_session(kind: str, has_drafts: bool, has_masks: bool) -> None:
    for window in ("auto", "5") if has_masks else ("auto",):
        one, other = (decode(kind, window).make_decoder(frozenset(), ChainCosts(1)) for _ in range(2))
        assert one is not other
        proposal = one.propose([1, 2, 3, 4] * 3, 1, 99)
        assert (bool(proposal.drafts), bool(proposal.masks)) == (has_drafts, has_masks)
        assert proposal.verifies == (kind != "diffusion-fast")
        assert decode(kind, window) == Decode(kind, None if window == "auto" else 5)
    assert decode("auto", "auto").window is None


def small_steps() -> ChainCosts:
    """Of a chain on which every row is as dear as a whole step."""
    costs = ChainCosts(1)
    for num_rows in (1, 1, 64, 64):
        costs.steps.observe(num_rows, 0.01 * num_rows)
    return costs


def test_a_window_of_the_users_is_kept_and_auto_goes_by_what_steps_cost_where_that_changes_no_text() -> None:
    costs = small_steps()
    assert decode("diffusion", "5").make_decoder(frozenset(), costs).tail == 5
    assert decode("diffusion").make_decoder(frozenset(), costs).tail == 0
    assert decode("diffusion").make_decoder(frozenset(), ChainCosts(1)).tail == 16
    assert decode("diffusion-fast", "5").make_decoder(frozenset(), costs).tail == 5
    assert decode("diffusion-fast").make_decoder(frozenset(), costs).tail == 16


@pytest.mark.parametrize(
    ("mask", "layers", "expected"),
    [
        (7, (FULL, FULL), "diffusion"),
        (0, (FULL, FULL), "diffusion"),  # an id like any other
        (None, (FULL, FULL), "ar"),
        (7, (FULL, RECURRENT), "ar"),
        (None, (RECURRENT,), "ar"),
    ],
)
def test_auto_is_diffusion_where_it_can_be(mask: int | None, layers: tuple[LayerSpec, ...], expected: str) -> None:
    found = suit(decode("auto", "8"), Cache(), spec(mask, layers))
    assert found == Decode(expected, 8)


def test_a_kind_that_the_model_cannot_is_refused_with_the_ones_that_it_can() -> None:
    outside = LayerSpec(100, (Memory(state_arrays=1, state_bytes=10, of_embedding=True),))
    hybrid = spec(layers=(FULL, FULL, RECURRENT, FULL, RECURRENT))
    for kinds, model, words in (
        (DIFFUSION, hybrid, r"the first is layer 2\b.*use ngram or ar$"),
        (DIFFUSION, spec(mask=None), "has no mask_token_id.*use ngram or ar$"),
        (DRAFTING, spec(layers=(outside, FULL)), "outside of its layers.*use ar$"),
    ):
        for kind in kinds:
            with pytest.raises(InputError, match=f"decode: {kind} .*tiny .*{words}"):
                suit(decode(kind), Cache(), model)
    for model in (hybrid, spec(mask=None)):
        assert suit(decode("ngram"), Cache(), model).kind == "ngram"
    for kind in ("ar", "ngram"):  # without masks, with any cache
        assert suit(decode(kind), make_cache_choice("rotating", 9), spec()).kind == kind


@pytest.mark.parametrize(
    ("window", "max_kv_size", "fits"),
    [(100, None, False), (128, None, False), (16, 16, False), (17, 16, False), (99, 64, False), (120, 1000, False),
     (99, None, True), (15, 16, True), (1, 9, True)],
)  # fmt: skip
def test_only_windows_that_fit_are_taken(window: int, max_kv_size: int | None, fits: bool) -> None:
    cache = make_cache_choice("rotating" if max_kv_size else "full", max_kv_size)
    for kind in (*DIFFUSION, "auto"):
        if fits:
            assert suit(decode(kind, str(window)), cache, spec()).window == window
        else:
            with pytest.raises(InputError, match=f"^window: expected less than the {min(100, max_kv_size or 100)} tok"):
                suit(decode(kind, str(window)), cache, spec())


def test_auto_makes_no_window_where_the_cache_has_no_room_for_one_and_the_user_asked_for_none() -> None:
    assert suit(decode("auto"), make_cache_choice("rotating", 16), spec()).kind == "ar"
    assert suit(decode("auto"), make_cache_choice("rotating", 17), spec()).kind == "diffusion"


def test_a_cache_that_makes_no_sense_is_refused_and_all_others_are_made() -> None:
    assert make_cache_choice("full", None) == Cache(kind=CACHE_FULL)
    assert make_cache_choice("int8") == Cache(kind=CACHE_INT8)
    assert make_cache_choice("int4") == Cache(kind=CACHE_INT4)
    for keep, found in ((0, 0), ("16", 16), ("system", 4)):
        assert make_cache_choice("rotating", 21, keep) == Cache(kind=CACHE_ROTATING, size=21, keep=found)
    for size in (9, 4096):
        assert make_cache_choice("rotating", size) == Cache(kind=CACHE_ROTATING, size=size, keep=4)
    for kind, max_kv_size, keep, field in (
        ("int2", None, None, "kv"), ("", None, None, "kv"),
        ("full", 100, None, "max_kv_size"), ("int4", 100, None, "max_kv_size"), ("int4", None, 4, "kv_keep"),
        *(("rotating", 100, keep, "kv_keep") for keep in (-1, "-1", "all", "", "1.5", "9" * 5000, 1 << 32)),
        *(("rotating", size, None, "max_kv_size") for size in (None, 8, 1, 0, -5, 1 << 32)),
        ("rotating", 20, 16, "max_kv_size"),
    ):  # fmt: skip
        with pytest.raises(InputError) as refusal:
            make_cache_choice(kind, max_kv_size, keep)
        assert refusal.value.field == field


def test_more_drafts_than_a_heads_block_holds_are_refused() -> None:
    head = DraftHead(HeadKind.DFLASH, {}, 1, 8, 8, 1, 8, num_taps=1, block_size=8)
    model = replace(spec(), drafter=replace(spec(), head=head))
    for number in ("auto", "7"):
        assert suit(make_decode("draft", num_draft_tokens=number), Cache(), model).kind == "draft"
    with pytest.raises(InputError, match=r"^num_draft_tokens: expected at most 7.*got 8"):
        suit(make_decode("draft", num_draft_tokens="8"), Cache(), model)


def test_thresholds_of_another_model_are_refused() -> None:
    fast = decode("diffusion-fast", threshold=0.3)
    assert suit(replace(fast, calibrated_on="tiny"), Cache(), spec()) == fast
    with pytest.raises(InputError) as refusal:
        suit(replace(fast, calibrated_on="small"), Cache(), spec())
    assert refusal.value.field == "entropy_threshold"
