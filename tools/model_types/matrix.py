"""One row per model type: whether it can be cut between its layers, and what of caches and lanes it may have."""

import tempfile
import traceback
from collections.abc import Callable, Container
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx

from tools.model_types.chain import Chain, Feed
from tools.model_types.checks import PROMPT, Whole, calls, cut, difference, int8, lanes, passes, rotating
from tools.model_types.make import make_type
from tools.model_types.quantised import makers
from tools.model_types.row import CLOSE, EQUAL, MISSING, Row
from worker.compute import shard
from worker.errors import BrigadeError
from worker.model.checkpoint import open_folder
from worker.model.families import LaneForm, lane_form

INT8_UNIT = 64  # 8-bit caches take groups of 32 numbers, and a rotated part of a head has half a unit
CHANGED = 2  # the layer that the control changes by 1 %

# what mlx-lm's models raise, and we, where something does not fit
_FAILURES = (
    ArithmeticError, AssertionError, AttributeError, BrigadeError, ImportError, LookupError, NotImplementedError,
    OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def look_at(name: str) -> Row:
    """The row of a type, or of a variant of it (`hunyuan:cla`), as far as float32 and whole caches go."""
    row = Row(name)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            whole = Whole(make_type(folder / "model", name))
        except _FAILURES as error:
            row.fits = MISSING + _reason(error, folder)
            return row
        row.caches = whole.caches()
        chains: list[Chain] = []
        row.fits = answer(lambda: _is_whole(name, folder, whole, chains), folder)
        if row.is_cut:
            row.cut = answer(lambda: cut(chains[0]), folder)
            row.lanes = _lanes(chains[0], folder)
            row.calls = calls(chains[0])
    return row


def _is_whole(name: str, folder: Path, whole: Whole, chains: list[Chain]) -> str:
    """The verdict of every boundary, unless the control is not noticed. `chains` takes the chain."""
    chains.append(Chain(folder / "model"))
    changed = chains[0].with_stage(CHANGED, make_type(folder / "changed", name, changed_layer=CHANGED))
    if difference(changed.run(Feed(changed.open(), PROMPT)), whole.passes[:1]) == 0:
        return "a changed layer is not noticed"
    return whole.compared(passes(chains[0]))


def _lanes(chain: Chain, folder: Path) -> str:
    """The form of lane that the type has, and what is wrong with it if anything is."""
    form = lane_form(open_folder(folder / "model").config)
    verdict = answer(lambda: lanes(chain), folder)
    return form.value if verdict in (EQUAL, CLOSE) else f"{form.value}: {verdict}"


def best_lanes(name: str) -> str:
    """The first form of lane that serves a type, whichever it has: what its row in worker/model/families.py may say."""
    with tempfile.TemporaryDirectory() as place:
        folder = make_type(Path(place), name)
        for form in LaneForm:
            with patch.object(shard, "lane_form", lambda config, form=form: form):
                if answer(lambda: lanes(Chain(folder)), folder) in (EQUAL, CLOSE):
                    return form.value
    return "none"


def bf16(name: str) -> str:
    """Whether a type fits in bfloat16, too."""
    return fits(lambda folder: make_type(folder, name, dtype=mx.bfloat16))


def rotating_of(name: str) -> str:
    """Whether caches that let go of tokens serve a type."""
    with tempfile.TemporaryDirectory() as place:
        folder = make_type(Path(place), name)
        return answer(lambda: rotating(chain := Chain(folder), Chain(folder, [chain.spec.num_layers])), folder)


def int8_of(name: str) -> str:
    """Whether caches of 8 bits serve a type."""
    with tempfile.TemporaryDirectory() as place:
        folder = make_type(Path(place), name, unit=INT8_UNIT)
        return answer(lambda: int8(Chain(folder)), folder)


def quantisations(name: str, titles: Container[str] | None = None) -> dict[str, str]:
    """Whether the quantised models of a family are the whole ones at every boundary, by quantisation: all, or these."""
    return {title: fits(make) for title, make in makers(name).items() if titles is None or title in titles}


def fits(make: Callable[[Path], object]) -> str:
    """Whether the model that this writes to a folder is the whole one's at every boundary."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            make(folder)
            whole = Whole(folder)
        except _FAILURES as error:
            return MISSING + _reason(error, folder)
        return answer(lambda: whole.compared(passes(Chain(folder))), folder)


def answer(check: Callable[[], str], folder: Path) -> str:
    """What a check says; `no: ...` where we refuse, `fails: ...` where something breaks."""
    try:
        return check()
    except BrigadeError as error:
        return f"no: {_reason(error, folder)}"
    except _FAILURES as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"fails: {_reason(error, folder)} ({Path(place.filename).name}:{place.lineno})"


def _reason(error: Exception, folder: Path) -> str:
    """One line without the names of this machine."""
    line = (str(error).splitlines() or [""])[0]
    for path in folder.iterdir():
        line = line.replace(f"{path}: ", "").replace(str(path), "the model")
    line = line.replace(f"{folder}: ", "").replace(str(folder), "the model")
    return line if isinstance(error, BrigadeError) else f"{type(error).__name__}: {line}"
