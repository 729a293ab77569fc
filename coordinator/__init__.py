"""Plan, sessions, scheduler, the chain as seen from its head, and the command line."""

import worker  # noqa: F401 - it quiets gRPC, before anything here imports that
