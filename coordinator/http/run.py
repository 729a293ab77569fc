"""From a configuration to a server that answers until it is told to stop. HTTP and gRPC share one event loop."""

import time
from pathlib import Path

from coordinator.cluster.options import ClusterOptions
from coordinator.http.app import make_app
from coordinator.http.life import Over, keep_serving
from coordinator.http.listen import answering, listening
from coordinator.http.served import Served
from coordinator.http.serving import Serving
from coordinator.resident.aside import OneAtATime
from coordinator.resident.frontend import Frontend
from coordinator.resident.model import Standing, State
from coordinator.resident.tally import Tally
from coordinator.resident.watch_log import logged


async def serve(options: ClusterOptions, serving: Serving) -> None:
    """Answer until cancelled, then end what is under way.

    Raises:
        ConfigError: the port is taken. ModelError, InputError: the model cannot be served.
        BrigadeError: the first chain could not be opened.
    """
    tally = Tally()
    frontend = await Frontend.read(
        options.model,
        trust_remote_code=options.trust_remote_code,
        sampling=serving.sampling,
        max_tokens=serving.limits.max_tokens,
        aside=OneAtATime(max_wait_s=serving.limits.queue_timeout_s, on_refused=tally.refuse),
    )
    served = Served(
        frontend,
        serving.names or (_name_of(frontend),),
        int(time.time()),
        serving.limits,
        tally=tally,
        most_waking=serving.max_waiting,
    )
    app = make_app(served, keys=serving.keys, hosts=serving.hosts, origins=serving.cors_origins)
    with listening(serving.host, serving.port) as listener:
        url = serving.url(listener.getsockname()[1])
        telling = logged(served.tally, served.watch, lambda: served.model)
        async with telling, answering(app, listener, serving.tls) as answers:
            try:
                await keep_serving(options, serving, served, url, answers)
            finally:  # whoever still waits for a model is told, before the answers are ended
                served.lose(Standing(State.DRAINING, Over.STOPPED.value))


def _name_of(frontend: Frontend) -> str:
    """What clients call the model: a folder's own name, whose path is nobody's affair."""
    name = frontend.checkpoint.name
    return Path(name).name if Path(name).is_absolute() else name
