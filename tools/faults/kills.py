"""kill -9 at every moment, of every stage, under every decoder: the streams are those of the unfailed run."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from coordinator.sessions.request import Request
from tools.faults.asked import DECODES, KINDS, four, of_kind
from tools.faults.case import COMES_BACK, IS_GONE, KILLED_S, Case, num_pieces
from tools.faults.rig import NAMES, Rig
from tools.faults.trial import Seen

MOMENTS = ("0", "1", "middle", "last")
EQUAL = f"noticed within {KILLED_S:g} s, every stream equal"


def kills() -> Iterator[Case]:
    """Every other worker is started again, the others are done without."""
    for decode, count in product(DECODES, (1, 4)):
        group = f"kill-{decode}-{count}"
        for number, (name, moment) in enumerate(product(NAMES, MOMENTS)):
            comes_back = (number + number // len(MOMENTS)) % 2 == 1
            yield kill_case(group, decode, count, name, moment, comes_back=comes_back)


def kill_case(group: str, decode: str, count: int, name: str, moment: str, *, comes_back: bool) -> Case:
    how = "started again" if comes_back else "not started again"
    done = f"{decode}, {'alone' if count == 1 else f'{count} at once'}: kill -9 {name} at token {moment}, {how}"

    async def run(rig: Rig) -> Seen:
        asked = four(rig, decode)[:count] if count > 1 else four(rig, decode)[2:3]
        return await kill(rig, asked, name, moment, comes_back=comes_back)

    return Case(group, done, EQUAL, run)


def kinds() -> Iterator[Case]:
    """Each kind of answer, with a loss in its middle."""
    for number, (decode, kind) in enumerate(product(DECODES, KINDS)):
        done = f"{decode}, {kind}: kill -9 {NAMES[number % 2]} in the middle"
        yield Case(
            f"kinds-{decode}", done, EQUAL, partial(_kill_kind, kind=kind, decode=decode, name=NAMES[number % 2])
        )


async def kill(rig: Rig, asked: Sequence[Request], name: str, moment: str, *, comes_back: bool) -> Seen:
    await rig.make_whole()
    expected = await rig.expected(asked)
    last = num_pieces(expected[0]) - 1
    at = {"0": 0, "1": 1, "middle": last // 2, "last": last}[moment]
    async with rig.opened(rig.options(COMES_BACK if comes_back else IS_GONE)) as trial:
        await trial.begin(asked, at, rig.nodes[name].kill)
        await trial.wait_lost()
        if comes_back:
            rig.nodes[name].start()
        found = await trial.answers()
        return trial.seen(found, expected, is_kept=trial.is_noticed_within(KILLED_S) and len(trial.lost_at) == 1)


async def _kill_kind(rig: Rig, kind: str, decode: str, name: str) -> Seen:
    return await kill(rig, await of_kind(rig, kind, decode), name, "middle", comes_back=False)
