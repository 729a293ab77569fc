"""Stands in a model's folder, not here: transformers imports a copy of it."""

from typing import Any, ClassVar

from transformers import PreTrainedTokenizer

from .byte_ranks import read_ranks


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file: str, **kwargs: Any) -> None:
        self._ranks = read_ranks(vocab_file)
        self._bytes = {rank: token for token, rank in self._ranks.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._ranks)

    def get_vocab(self) -> dict[str, int]:
        return {token.decode("latin-1"): rank for token, rank in self._ranks.items()} | self._added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [chr(byte) for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return self._ranks[token.encode("latin-1")]

    def _convert_id_to_token(self, index: int) -> str:
        return self._bytes.get(index, b"").decode("latin-1")

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).encode("latin-1").decode(errors="replace")
