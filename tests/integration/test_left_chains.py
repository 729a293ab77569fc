"""Why a worker left a chain, where its coordinator takes it off at the moment of the failure."""

import io
import time

from tests.integration.conftest import Models, opened, serving
from tests.integration.many import until
from worker.errors import ModelError


async def test_a_failure_is_told_though_the_call_is_cancelled_before_it_is_reported(models: Models) -> None:
    out = io.StringIO()
    async with serving(1, out=out) as [node], opened(models("qwen3").folder, (2, 2), [node]):
        attachment = node.service.worker.attachment
        stage = attachment.stage if attachment else None
        assert attachment and stage
        node.thread.post(lambda: stage.fail(ModelError("no such kernel")))
        while stage.failure is None:
            time.sleep(0.001)  # noqa: ASYNC251 - this loop must not hear of it before the call is cancelled
        attachment.replace()
        await until(lambda: "left" in out.getvalue())
    assert out.getvalue().splitlines()[-1] == "worker node-1: left the chain of coordinator coordinator: no such kernel"
