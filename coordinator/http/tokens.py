"""`POST /tokenize` and `POST /detokenize`. No node is asked."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.errors import refuse
from coordinator.http.json_response import JSONResponse
from coordinator.http.reading import read_body
from coordinator.http.served import Served
from coordinator.http.streams import unless_left
from coordinator.shapes.tokenizing import DetokenizeBody, TokenizeBody
from worker.errors import ContextExceeded

_CONTEXTS, _LEAST_BOUND = 2, 32768


async def tokenize(request: Request) -> Response:
    """The token ids of a text or of a conversation."""
    served: Served = request.app.state.served
    body = await read_body(request, TokenizeBody, served.limits.body_bytes)
    served.require_name(body.model)
    field = "messages" if body.prompt is None else "prompt"
    try:
        tokens = await unless_left(request, _tokens_of(body, served))
    except ContextExceeded as error:  # which is plain before it is tokenized
        raise refuse(413, f"{field}: {error.message}", "too_many_tokens", param=field) from None
    _require_few(tokens, served, field)
    strings = await unless_left(request, served.frontend.token_texts(tokens)) if body.return_token_strs else None
    return JSONResponse(
        {"count": len(tokens), "max_model_len": served.context, "tokens": tokens, "token_strs": strings}
    )


async def detokenize(request: Request) -> Response:
    """What token ids say."""
    served: Served = request.app.state.served
    body = await read_body(request, DetokenizeBody, served.limits.body_bytes)
    served.require_name(body.model)
    _require_few(body.tokens, served, "tokens")
    return JSONResponse({"prompt": await unless_left(request, served.frontend.text_of(body.tokens))})


async def _tokens_of(body: TokenizeBody, served: Served) -> list[int]:
    frontend, most = served.frontend, _most_tokens(served)
    if body.prompt is not None:
        return await frontend.text_ids(body.prompt, special=body.add_special_tokens, most=most)
    return list(await frontend.prompt_ids(body.conversation(), most=most))


def _most_tokens(served: Served) -> int:
    return max(_LEAST_BOUND, _CONTEXTS * served.frontend.spec.context)


def _require_few(tokens: Sequence[int], served: Served, field: str) -> None:
    """Raise Refusal for more than anybody has a use for: what is a little too long may be counted, and cut."""
    most = _most_tokens(served)
    if len(tokens) > most:
        raise refuse(
            413, f"{field}: expected at most {most} tokens, found {len(tokens)}", "too_many_tokens", param=field
        )
