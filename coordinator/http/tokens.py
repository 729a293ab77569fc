"""`POST /tokenize` and `POST /detokenize`. No node is asked."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.http.reading import read_body
from coordinator.http.served import Served
from coordinator.shapes.tokenizing import DetokenizeBody, TokenizeBody


async def tokenize(request: Request) -> Response:
    """The token ids of a text or of a conversation."""
    served: Served = request.app.state.served
    body = await read_body(request, TokenizeBody, served.limits.body_bytes)
    served.require_name(body.model)
    if body.prompt is not None:
        tokens = await served.frontend.text_ids(body.prompt, special=body.add_special_tokens)
    else:
        tokens = list(await served.frontend.prompt_ids(body.conversation()))
    strings = [served.frontend.token_text(token) for token in tokens] if body.return_token_strs else None
    return JSONResponse(
        {"count": len(tokens), "max_model_len": served.context, "tokens": tokens, "token_strs": strings}
    )


async def detokenize(request: Request) -> Response:
    """What token ids say."""
    served: Served = request.app.state.served
    body = await read_body(request, DetokenizeBody, served.limits.body_bytes)
    served.require_name(body.model)
    return JSONResponse({"prompt": await served.frontend.text_of(body.tokens)})
