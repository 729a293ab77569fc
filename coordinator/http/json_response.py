"""JSON answers that can always be sent, whatever a model says."""

import json
from typing import Any

from starlette.responses import JSONResponse as StarlettesResponse


class JSONResponse(StarlettesResponse):
    """As starlette's, but half of a character, which no UTF-8 can hold, is sent as its escape."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode(errors="backslashreplace")
