"""Text as it streams: stop strings against a plain search, characters against a real byte-level tokenizer."""

import json
import random
from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from coordinator.engine.tokenizer import Tokenizer
from coordinator.sessions.output import Output, Token
from coordinator.sessions.text import StopText, TextParser
from worker.errors import InputError, ModelError
from worker.model.checkpoint import Checkpoint

# Latin, two, three and four byte characters, an emoji of seven code points, a flag, combining marks
TEXTS = (
    "plain words, and more.",
    "naïve café — façade",
    "日本語と中文、한국어",
    "🙂🚀 👩‍👩‍👧‍👦 🇫🇷 done",
    "e\u0301 a\u0323\u0302 ᾳ",
    "mixed 日🙂x\n\n  two spaces\tand 漢字 end",
)


def plain_search(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """What may be printed: the text up to the stop string that is complete first, else all of it."""
    text = ""
    for letter in "".join(pieces):
        text += letter
        if starts := [text.index(stop) for stop in stops if stop in text]:
            return text[: min(starts)], True
    return text, False


@pytest.mark.parametrize("seed", range(10))
def test_what_comes_out_is_exactly_what_stands_before_the_first_stop_string(seed: int) -> None:
    """Few letters, so that stops overlap each other, themselves and the edges of the pieces."""
    numbers = random.Random(seed)
    num_matched = 0

    def word(longest: int, shortest: int = 0) -> str:
        return "".join(numbers.choice("aab") for _ in range(numbers.randint(shortest, longest)))

    for _ in range(100):
        stops = [word(5, 1) for _ in range(numbers.randint(0, 3))]
        pieces = [word(4) for _ in range(numbers.randint(0, 10))]
        stop, text, out = StopText(stops), "", ""
        for piece in pieces:
            text += piece
            out += stop.push(piece)
            if stop.found is None:  # nothing is held back longer than it could be a stop string
                held = text[len(out) :]
                assert text.startswith(out)
                assert held == "" or any(s.startswith(held) and s != held for s in stops)
        out += stop.flush()
        assert (out, stop.found is not None) == plain_search(pieces, stops), (stops, pieces)
        assert not any(stop in out for stop in stops), (stops, pieces)
        num_matched += stop.found is not None
    assert 20 < num_matched < 80, "both outcomes must be tried"


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "found"),
    [
        (["END"], ["some text E", "ND and more"], ["some text ", "", ""], "END"),
        (["END"], ["some text E", "N", "OUGH"], ["some text ", "", "ENOUGH", ""], None),
        (["abcd", "bc"], ["a", "b", "c"], ["", "", "a", ""], "bc"),
        (["bc", "c"], ["a", "bc"], ["a", "", ""], "bc"),
        (["\n\n"], ["one\n", "two\n", "\n"], ["one", "\ntwo", "", ""], "\n\n"),
        ([""], ["nothing ", "stops"], ["nothing ", "stops", ""], None),
    ],
)
def test_stop_strings_by_piece(stops: list[str], pieces: list[str], expected: list[str], found: str | None) -> None:
    stop = StopText(stops)
    assert [*map(stop.push, pieces), stop.flush()] == expected
    assert stop.found == found


def byte_level_tokenizer() -> FastTokenizer:
    """One token per byte, and some merges that end inside characters or join the end of one to the next."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = []
    to_chars = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def chars(text: str) -> str:
        return "".join(piece for piece, _ in to_chars.pre_tokenize_str(text))

    for text in ("日", "🙂", "é", "语日"):
        encoded = chars(text)
        merges.append((encoded[0], encoded[1]))
        merges.append((encoded[-2], encoded[-1]))
    merges += [("e", "n"), ("en", "d"), (chars(" "), "a")]
    kept = []
    for left, right in merges:
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            kept.append((left, right))
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=kept))
    tokenizer.pre_tokenizer = to_chars
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def bare(folder: Path) -> Checkpoint:
    return Checkpoint("", folder, {}, {})


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(bare(folder))


def is_whole(text: str) -> bool:
    return "\ufffd" not in text


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_have_whole_characters_and_are_the_text_wherever_it_is_cut(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    sizes = [len(byte_level_tokenizer().id_to_token(token)) for token in tokens]  # one letter stands for one byte
    for length in range(len(tokens) + 1):
        stream = tokenizer.stream(())
        pieces = [stream.push(token) for token in tokens[:length]]
        assert length < len(tokens) or text == TEXTS[0] or "" in pieces, "or this would prove nothing"
        pieces.append(stream.finish())
        assert all(map(is_whole, pieces))
        whole = text.encode()[: sum(sizes[:length])].decode(errors="ignore")
        assert "".join(pieces) == stream.text == whole


@pytest.mark.parametrize("text", ["a\ufffd\ufffd", "\ufffd", "日\ufffd日", "日日日日", "\ufffd" * 9 + "日"])
def test_a_replacement_character_is_told_and_an_incomplete_one_is_not(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    for length in range(len(tokens) + 1):
        stream = tokenizer.stream(())
        for token in tokens[:length]:
            stream.push(token)
        stream.finish()
        spelled = b"".join(tokenizer.token_bytes(token) or b"" for token in tokens[:length])
        assert stream.text == spelled.decode(errors="ignore")


@pytest.mark.parametrize("text", TEXTS)
def test_a_stop_string_is_found_across_tokens(tokenizer: Tokenizer, text: str) -> None:
    for stop in ("🙂", "日", "x", "中文", "\n\n", "👧", "e"):
        stream = tokenizer.stream((stop,))
        for token in tokenizer.encode(text):
            assert stream.stopped_by is None
            stream.push(token)
            if stream.stopped_by is not None:
                break
        stream.finish()
        assert stream.text == text.partition(stop)[0]
        assert (stream.stopped_by is not None) == (stop in text)


def test_only_what_continues_a_text_keeps_the_space_that_it_begins_with(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(" a 日")
    for continues_text, expected in ((True, " a 日"), (False, "a 日")):
        stream = tokenizer.stream(continues_text=continues_text)
        assert "".join([*map(stream.push, tokens), stream.finish()]) == stream.text == expected


def test_any_detokenizer_of_mlx_lm_will_do(folder: Path) -> None:
    """The naive one decodes everything again at each token, and shows half characters in another way."""
    from transformers import AutoTokenizer

    wrapper = TokenizerWrapper(AutoTokenizer.from_pretrained(folder))
    for text in TEXTS:
        stream = TextParser(wrapper.detokenizer)
        pieces = [stream.push(token) for token in wrapper.encode(text)]
        pieces.append(stream.finish())
        assert all(map(is_whole, pieces))
        assert "".join(pieces) == text


def test_an_output_has_no_token_after_its_stop_string(tokenizer: Tokenizer) -> None:
    tokens = [Token(token) for token in tokenizer.encode("one x two")]
    output = Output("", list(tokens), 0)
    tokenizer.stream(("x",)).read(output)
    count = next(n for n in range(len(tokens)) if "x" in tokenizer.decode([each.token for each in tokens[:n]]))
    assert (output.text, output.finish_reason, output.stop) == ("one ", "stop", "x")
    assert output.tokens == tokens[:count] and count < len(tokens)


def test_no_stop_string_begins_in_the_least_tokens_of_an_answer(tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.encode(letter)[-1] for letter in "xyxyz"]
    for min_tokens, expected in ((0, ""), (1, "xy"), (3, "xyxyz")):
        stream = tokenizer.stream(("x",), min_tokens=min_tokens)
        stream.read(Output("", [Token(token) for token in tokens], 0, "stop"))
        assert stream.text == expected


def test_an_end_of_sequence_token_has_no_text(tokenizer: Tokenizer) -> None:
    tokens = [Token(token) for token in (*tokenizer.encode("some"), *tokenizer.eos)]
    output = Output("", tokens, 0, "stop")
    tokenizer.stream(()).read(output, tokenizer.eos)
    assert (output.text, output.tokens) == ("some", tokens)


class Late:
    """A detokenizer that holds all text back until the end, as mlx-lm's do with an incomplete character."""

    last_segment = ""

    def add_token(self, token: int) -> None:
        pass

    def finalize(self) -> None:
        self.last_segment = "some END and more"


def test_text_that_the_detokenizer_held_back_may_hold_a_stop_string() -> None:
    stream = TextParser(Late(), ("END",))
    assert (stream.push(1), stream.finish(), stream.stopped_by) == ("", "some ", "END")


def test_a_conversation_ends_where_the_answer_begins(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    assert tokenizer.eos == frozenset(tokenizer.encode("<|im_end|>")) and len(tokenizer.eos) == 1
    tokens = tokenizer.encode_chat([{"role": "system", "content": "be kind"}, {"role": "user", "content": "日"}])
    stream = tokenizer.stream(())
    for token in tokens:
        stream.push(token)
    stream.finish()
    assert stream.text == "[system]be kind[user]日[assistant]"
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(InputError, match=r"^prompt: .*no chat template; give it raw"):
        Tokenizer(bare(tmp_path)).encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("damage", ["absent", "no JSON", "another file"])
def test_a_tokenizer_that_cannot_be_read_is_a_model_error_of_one_line(tmp_path: Path, damage: str) -> None:
    if damage != "absent":
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        (tmp_path / "tokenizer.json").write_text("{" if damage == "no JSON" else '{"version": "1.0"}')
    with pytest.raises(ModelError) as caught:
        Tokenizer(bare(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_the_bytes_of_tokens_are_those_of_the_text_though_characters_have_several(tokenizer: Tokenizer) -> None:
    text = "naïve ☃ 🦊 �"
    tokens = tokenizer.encode(text)
    parts = [tokenizer.token_bytes(token) for token in tokens]
    assert b"".join(part for part in parts if part is not None) == text.encode() and None not in parts
    assert any("�" in tokenizer.decode([token]) for token in tokens)
