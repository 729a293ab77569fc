"""Model folders with random weights whose tokenizer marks thoughts and calls."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.cluster.models import VOCAB, make_talker
from tests.tiny import change_json

_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% for tool_call in m.tool_calls or [] %}"
    "<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}{% endfor %}assistant: "
)
THINK_BEGIN, THINK_END = VOCAB, VOCAB + 1


PLAIN_CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
CALL_BEGIN = VOCAB + 2


def make_caller(
    folder: Path, *, thinks: bool, has_markers: bool = True, knows_tools: bool = True, **config: Any
) -> Path:
    """One that calls tools in JSON, with tokens of their own for its markers where it `has_markers`.

    If it `thinks`, its template ends where a thought has begun. It may not know tools.
    """
    make_talker(folder, vocab_size=VOCAB + 8, mask_token_id=VOCAB + 7, **config)
    if has_markers:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in _MARKERS])
        tokenizer.save(str(folder / "tokenizer.json"))
    chat = (CHAT if knows_tools else PLAIN_CHAT) + ("<think>" if thinks else "")
    change_json(folder / "tokenizer_config.json", chat_template=chat)
    return folder
