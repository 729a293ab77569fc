"""What stops and goes on: workers, links and the coordinator itself; and links that spoil what they carry."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from tools.faults.asked import asking_four, greedy
from tools.faults.case import COMES_BACK, IS_GONE, STOPPED_S, Case, num_pieces, still
from tools.faults.rig import NAMES, Rig
from tools.faults.trial import FAR_S, Seen, Trial
from tools.proxy import Proxy, proxy_to
from tools.worker_process import until

Harm = Callable[[Proxy], None]

TAKEN_BACK_S = 5.0
_CUT_S = 4.0

FENCED = f"noticed within {STOPPED_S:g} s, every stream equal, then taken back within {TAKEN_BACK_S:g} s"
UNSEEN = "nothing is lost, every stream equal"
NEVER_WRONG = "the hop is given up, every stream equal"


def stops() -> Iterator[Case]:
    for name in NAMES:
        yield Case("stop", f"SIGSTOP {name}, SIGCONT after 0.5 s", UNSEEN, partial(pause, name=name))
        yield Case("stop", f"SIGSTOP {name}, SIGCONT after 10 s", FENCED, partial(stop, name=name, seconds=10))


def links() -> Iterator[Case]:
    for name in NAMES:
        cut = f"every link to {name}"
        yield Case("link", f"{cut} is cut for {_CUT_S:g} s", FENCED, partial(cut_link, name=name, cut=both))
    yield Case("link", "last is sent nothing for 4 s, but heard", FENCED, partial(cut_link, name="last", cut=there))
    yield Case("link", "last is not heard for 4 s, but sent to", FENCED, partial(cut_link, name="last", cut=back))
    for name in NAMES:
        yield Case("link", f"connections to {name} are reset", NEVER_WRONG, partial(spoil, name=name, harm=Proxy.reset))
    for what, (name, value) in CONDITIONS.items():
        yield Case("link", f"the links to last {what}", UNSEEN, partial(bear, name=name, value=value))
    for what, harm in HARMS.items():
        yield Case("link", what, NEVER_WRONG, partial(spoil, name="last", harm=harm, times=3))


async def pause(rig: Rig, name: str) -> Seen:
    node = rig.nodes[name]
    async with asking_four(rig, COMES_BACK) as (trial, asked, expected):
        await trial.begin(asked, num_pieces(expected[0]) // 2, lambda: node.signal(signal.SIGSTOP))
        await until(lambda: trial.fault_at, 30, "the worker is stopped")
        await still(0.5)
        node.signal(signal.SIGCONT)
        found = await trial.answers()
        return trial.seen(found, expected, is_kept=not trial.lost_at)


async def stop(rig: Rig, name: str, seconds: float) -> Seen:
    node = rig.nodes[name]
    async with asking_four(rig, IS_GONE) as (trial, asked, expected):
        await trial.begin(asked, num_pieces(expected[0]) // 2, lambda: node.signal(signal.SIGSTOP))
        found = await trial.answers()
        await still(seconds - (trial.detect_s or 0))
        seen = trial.seen(found, expected, is_kept=trial.is_noticed_within(STOPPED_S))
        node.signal(signal.SIGCONT)
        return await taken_back(rig, trial, name, seen)


async def taken_back(rig: Rig, trial: Trial, name: str, seen: Seen) -> Seen:
    """It is told of, joins, and is part of the next chain, too.

    The other worker is lost only after that: a loss in the middle of a change of chains is none of its own.
    """
    took_s = await until(
        lambda: f"worker {name}: loading layers to rejoin" in trial.said, TAKEN_BACK_S, f"{name} is taken back"
    )
    await until(lambda: trial.cluster.chain.plan == trial.cluster.whole, FAR_S, f"{name} is part of the chain")
    [other] = set(NAMES) - {name}
    asked = [greedy(rig, max_tokens=12)]
    expected = await rig.expected(asked)
    num_lost = len(trial.lost_at)
    rig.nodes[other].kill()
    await until(lambda: len(trial.lost_at) > num_lost, 10, "the other is lost")
    answer = await trial.engine.answer(asked[0], parser=rig.tokenizer.stream(()))
    nodes = [assignment.name for assignment in trial.cluster.chain.plan.assignments[1:]]
    assert (answer.tokens, nodes) == (expected[0].tokens, [name]), f"the next chain is on {nodes}"
    return replace(seen, what=f"{seen.what}; {name} is taken back after {took_s:.1f} s")


def both(proxy: Proxy, value: bool) -> None:
    proxy.is_blackhole = value


def there(proxy: Proxy, value: bool) -> None:
    proxy.there.is_blackhole = value


def back(proxy: Proxy, value: bool) -> None:
    proxy.back.is_blackhole = value


async def cut_link(rig: Rig, name: str, cut: Callable[[Proxy, bool], None], seconds: float = _CUT_S) -> Seen:
    with proxy_to(rig.nodes[name].address) as proxy:
        async with asking_four(rig, IS_GONE, via={name: proxy.address}) as (trial, asked, expected):
            await trial.begin(asked, num_pieces(expected[0]) // 2, lambda: cut(proxy, True))
            found = await trial.answers()
            await still(seconds - (trial.detect_s or 0))
            seen = trial.seen(found, expected, is_kept=trial.is_noticed_within(STOPPED_S))
            cut(proxy, False)
            return await taken_back(rig, trial, name, seen)


CONDITIONS: dict[str, tuple[str, float]] = {  # an attribute of both ways of a proxy, and its value
    "take 30 ms each way": ("latency_s", 0.03),
    "carry 300 kB/s": ("bytes_per_s", 300_000),
    "carry pieces of 13 bytes": ("slice_bytes", 13),
}


async def bear(rig: Rig, name: str, value: float) -> Seen:
    with proxy_to(rig.last.address) as proxy:

        def change() -> None:
            for way in proxy.ways:
                setattr(way, name, value)

        async with asking_four(rig, COMES_BACK, via={"last": proxy.address}) as (trial, asked, expected):
            await trial.begin(asked, 5, change)
            found = await trial.answers()
            return trial.seen(found, expected, is_kept=not trial.lost_at)


HARMS: dict[str, Harm] = {
    "three bits flip in what last is sent": lambda proxy: setattr(proxy.there, "hop_flips", 1),
    "three bits flip in what last sends": lambda proxy: setattr(proxy.back, "hop_flips", 1),
    "bytes for last come twice, three times": lambda proxy: setattr(proxy.there, "duplicates", 1),
}


async def spoil(rig: Rig, name: str, harm: Harm, times: int = 1) -> Seen:
    """The harm is done again once the stream has gone on for some pieces."""
    with proxy_to(rig.nodes[name].address) as proxy:
        async with asking_four(rig, COMES_BACK, via={name: proxy.address}) as (trial, asked, expected):
            await trial.begin(asked, 5, lambda: harm(proxy))
            for number in range(1, times):
                await trial.live[0].wait_pieces(5 + 10 * number)
                harm(proxy)
            found = await trial.answers()
            return trial.seen(found, expected, is_kept=1 <= len(trial.lost_at) <= times)
