"""What a model says first, found out under a limit of memory: python -m tests.cluster.limited_reference FOLDER MIB MODE

The limit is on the data of this process, beyond what it holds once all is imported.
"""

import asyncio
import resource
import sys
from contextlib import closing
from pathlib import Path

from coordinator.quality.replay import Replay
from coordinator.quality.report import ComparedAnswer
from coordinator.quality.verify import Comparison
from coordinator.sessions.request import Request
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.platform.threads import MlxThread

PROMPT = tuple(range(3, 23))


def set_limit(num_bytes: int) -> None:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    most = int(status.partition("VmData:")[2].split()[0]) * 1024 + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


async def first_token(folder: Path, mode: str) -> int:
    """After PROMPT, by the reference that `verify` has in this mode."""
    checkpoint = open_folder(folder)
    with closing(MlxThread()) as thread:
        comparison = Comparison(checkpoint, describe(checkpoint), thread)
        replay, cases = Replay("case", Request(PROMPT, 1), []), list[ComparedAnswer]()
        if mode == "streamed":
            await comparison.stream_layers([replay.decode_pass()], [])
            await comparison.finish_streamed([replay], cases.append)
        else:
            await comparison.replay_in_memory([replay], cases.append)
    return cases[0].expected[0]


if __name__ == "__main__":
    set_limit(int(sys.argv[2]) * 2**20)
    print(asyncio.run(first_token(Path(sys.argv[1]), sys.argv[3])))
