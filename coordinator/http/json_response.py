"""JSON answers that can always be sent, whatever a model says."""

from typing import Any

from starlette.responses import JSONResponse as StarlettesResponse

from worker.process.json_text import json_bytes


class JSONResponse(StarlettesResponse):
    """As starlette's, but half of a character, which no UTF-8 can hold, is sent as its escape."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content, separators=(",", ":"), allow_nan=False)
