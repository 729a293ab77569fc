"""Looking around: who announces itself by now, and how each is reached."""

from functools import partial
from typing import NamedTuple

from coordinator.finding.browse import browse
from coordinator.finding.present import Present, presence
from coordinator.finding.ways import Map
from worker.config import Cluster
from worker.process.call_thread import run_aside


class Seen(NamedTuple):
    nodes: list[Present]
    num_ignored: int  # announcements


async def look_around(for_s: float, cluster: Cluster | None = None) -> Seen:
    """Listen for so long; with a configuration those of its workers are there, too, that were not heard.

    Raises:
        StageLost: this machine cannot listen.
    """
    heard = await browse(for_s)
    here = await run_aside(Map.read)
    return Seen(await run_aside(partial(presence, heard.nodes, cluster, here)), heard.num_ignored)
