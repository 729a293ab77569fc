"""`POST /v1/embeddings`: OpenAI's embeddings of texts."""

import base64
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from coordinator.api.body import ModelName, RawPrompts, Section
from coordinator.api.server import Server
from coordinator.engine.embeddings import embed, read_pooling
from coordinator.engine.inputs import renaming


class EmbeddingsBody(Section):
    """One text or several, each as text or as token ids."""

    model: ModelName | None = None
    input: Annotated[RawPrompts, Field(max_length=2048)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # in base64: float32, little-endian


class EmbeddingsUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


async def embeddings(server: Server, body: EmbeddingsBody) -> Embeddings:
    """Return the embedding of each text."""
    name, inputs = server.name_for(body.model), server.inputs
    pooling = read_pooling(inputs.checkpoint, inputs.spec.hidden_size, server.pooling)
    if body.dimensions is not None:
        pooling.require_dimensions(body.dimensions)
    data: list[Embedding] = []
    num_tokens = 0
    with renaming({"prompt": "input"}):
        embedded = await embed(await server.wake_engine(), body.input, pooling, body.dimensions)
    for index, (vector, num_here) in enumerate(embedded):
        is_text = body.encoding_format == "base64"
        found = base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_text else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": found})
        num_tokens += num_here
    usage: EmbeddingsUsage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": name, "usage": usage}
