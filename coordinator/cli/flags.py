"""The flags that commands share: records of flags, what they amount to, and flags that contradict each other."""

import json
import os.path
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.cluster.progress import say
from coordinator.decoding.decode_options import DECODE_FIELDS, Decode, make_decode
from coordinator.planning.plan import USUAL_REQUESTS, Goal
from coordinator.planning.recovery import USUAL, Limits
from coordinator.sessions.request import make_sampling, require_text, sampling_field
from worker.config import CONFIG, NO_DRAFTER, USING_CONFIG
from worker.errors import InputError
from worker.platform.run import field_of

T = TypeVar("T")
Number = TypeVar("Number", int, float)

CLUSTER, LOAD = "Cluster", "Load"

_cluster = partial(typer.Option, rich_help_panel=CLUSTER)
_recovery = partial(typer.Option, rich_help_panel="Recovery")
_windows = partial(typer.Option, rich_help_panel="Windows")
_output = partial(typer.Option, rich_help_panel="Output")
_sampler = partial(typer.Option, rich_help_panel="Sampling")
_server = partial(typer.Option, rich_help_panel="Server")

Config = Annotated[
    Path | None, _cluster(help="The model and the workers. (default: cluster.yaml of this folder, if it exists)")
]
Model = Annotated[
    str | None,
    _cluster(
        help="A folder, a hub repository (owner/name), or `demo`, the bundled model. (default: cluster.yaml's or demo)"
    ),
]
ObjectiveFlag = Annotated[
    Goal | None,
    _cluster(
        "--objective",
        metavar="GOAL",
        help="What the plan minimises where the nodes' speeds are known: `latency`, one request's time per token; "
        f"`throughput`, that of {USUAL_REQUESTS} requests at once, or of --concurrency; `prompt`: this "
        "machine holds the whole model and makes answers, while all compute prompts; `auto`: `prompt` where `latency` "
        "would leave all workers out. (default: cluster.yaml's or latency)",
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="The most tokens to generate.")]
DefaultMaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-m", min=1, help="The most tokens of an answer if its request sets no limit.")
]
PrefillStepSize = Annotated[
    int | None,
    typer.Option(min=1, max=8192, help="The most rows of a prompt chunk. (default: chosen by measured costs per row)"),
]
ApiKeyFile = Annotated[
    Path | None,
    _server(
        help="Keys, one per line: KEY or NAME KEY \\[at_once=N] \\[priority=N]. A server accepts all of them, and the "
        "one in BRIGADE_API_KEY; a client sends the first."
    ),
]
JsonFlag = Annotated[
    bool, _output("--json", help="Print one JSON object on stdout at the end, and nothing else there.")
]


@dataclass(frozen=True)
class ClusterFlags:
    """Which model runs where."""

    config: Config = None
    model: Model = None
    draft_model: Annotated[
        str | None,
        _cluster(
            metavar="FOLDER_OR_REPO",
            help="A small model with the same tokenizer, or a draft head (MTP, DFlash, EAGLE-3): it drafts several "
            "tokens per step where the next one is sampled. `none`: not even a head in the model's own folder drafts.",
        ),
    ] = None
    local: Annotated[
        int | None,
        _cluster(
            min=0,
            max=16,
            help="Start this many workers on loopback instead of using cluster.yaml's; 0 runs everything in this "
            "process.",
        ),
    ] = None
    layers: Annotated[
        str | None,
        _cluster(
            metavar="3,2,1",
            help="Layers per node, coordinator first; with --objective prompt, of prompts. (default: planned)",
        ),
    ] = None
    objective: ObjectiveFlag = None
    context: Annotated[
        int | None,
        _cluster(
            min=1,
            help="Tokens of a prompt with its answer that the plan reserves memory for. It limits no request: a longer "
            "one runs if it fits into the memory that is left. (default: 4096)",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        _cluster(
            "--trust-remote-code",
            help="Run the Python code of tokenizers that need it (Kimi's), once you have read it: it runs with your "
            "permissions. Without this flag it is neither run nor downloaded.",
        ),
    ] = False
    check_finite: Annotated[
        bool,
        _cluster(
            "--check-finite",
            help="Have every node check the outputs of its layers for NaN and infinities, and name the first that "
            "finds some.",
        ),
    ] = False
    rejoin_timeout: Annotated[
        float,
        _recovery(
            min=0,
            help="How long to wait for a lost node, seconds, before the others take its layers; --recovery-timeout "
            "where the model does not fit on them.",
        ),
    ] = USUAL.rejoin_s
    recovery_timeout: Annotated[
        float,
        _recovery(
            min=0,
            help="How long answers may pause after a node is lost, seconds, before they fail; 0: they fail at once.",
        ),
    ] = USUAL.recovery_s

    def options(self) -> ClusterOptions:
        """Return which model runs where, by these flags and the cluster.yaml.

        Raises:
            ConfigError: a file or a value cannot be read, or they contradict each other.
        """
        return cluster_options(
            find_config(self.config),
            self.model,
            self.local,
            None if self.layers is None else parse_layers(self.layers),
            self.context,
            self.trust_remote_code,
            self.check_finite,
            Limits(self.rejoin_timeout, self.recovery_timeout),
            self.draft_model,
            self.objective,
        )


MODEL = ("config", "model", "draft_model")  # fields of ClusterFlags, for commands that do not take all of them
SPLIT = (*MODEL, "local", "layers", "context")
TEXT = (*SPLIT, "trust_remote_code")
SERVING = (*TEXT, "check_finite", "rejoin_timeout", "recovery_timeout")


@dataclass(frozen=True)
class ServerFlags:
    """The running server that a client asks instead of loading a model."""

    server: Annotated[
        str | None,
        _server(
            "--server",
            metavar="URL",
            help="Ask a running `brigade serve`, such as http://localhost:9338, instead of loading a model.",
        ),
    ] = None
    api_key_file: ApiKeyFile = None

    def refuse_others(self, ctx: typer.Context) -> None:
        """Raise InputError for flags of the command line that contradict --server, or expect it."""
        if self.server is None:
            refuse_flags(ctx, ("api_key_file",), "expected only with --server, the URL that the key is for")
        else:
            for names, why in _NOT_WITH_SERVER.items():
                refuse_flags(ctx, names, f"not expected with --server, {why}")


_NOT_WITH_SERVER = {
    (*(field.name for field in fields(ClusterFlags)), "prefill_step_size"): "which has its model loaded",
    ("stats", "trace"): "whose API reports no stages",
    ("journal",): "which keeps no journal for its clients",
    ("prompt_cache",): "which keeps caches by its own `cache_disk`",
    ("logprobs",): "which sends no token ids; its /v1 routes return logprobs by the tokens' text",
}

_SWITCHED = (  # sampling flags, and those that matter only with them
    ("xtc_probability", "xtc_threshold"),
    ("presence_penalty", "presence_context_size"),
    ("frequency_penalty", "frequency_context_size"),
    *(("dry_multiplier", f"dry_{name}") for name in ("base", "allowed_length", "penalty_last_n", "sequence_breaker")),
)
MODELS_OWN = ("temp", "top_p", "top_k", "min_p", "repetition_penalty")  # fields of SamplingFlags


def _sampling(name: str, default: str = "", **settings: Any) -> Any:
    """Return the option of a sampling parameter, as `SamplingParams` describes it."""
    help = f"{sampling_field(name).description} {default and f'(default: {default})'}".rstrip()
    return _sampler(help=help, **settings)


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are drawn. The model's generation_config.json has the defaults, if it asks for sampling."""

    temp: Annotated[float | None, _sampling("temperature", "the model's, else 0")] = None
    top_p: Annotated[float | None, _sampling("top_p", "the model's, else off")] = None
    top_k: Annotated[int | None, _sampling("top_k", "the model's, else off")] = None
    min_p: Annotated[float | None, _sampling("min_p", "the model's, else off")] = None
    top_n_sigma: Annotated[float, _sampling("top_n_sigma")] = 0.0
    xtc_probability: Annotated[float, _sampling("xtc_probability")] = 0.0
    xtc_threshold: Annotated[float | None, _sampling("xtc_threshold", "0.1")] = None
    repetition_penalty: Annotated[float | None, _sampling("repetition_penalty", "the model's, else off")] = None
    repetition_context_size: Annotated[int | None, _sampling("repetition_context_size", "20")] = None
    presence_penalty: Annotated[float, _sampling("presence_penalty")] = 0.0
    presence_context_size: Annotated[int | None, _sampling("presence_context_size", "20")] = None
    frequency_penalty: Annotated[float, _sampling("frequency_penalty")] = 0.0
    frequency_context_size: Annotated[int | None, _sampling("frequency_context_size", "20")] = None
    dry_multiplier: Annotated[float, _sampling("dry_multiplier")] = 0.0
    dry_base: Annotated[float | None, _sampling("dry_base", "1.75")] = None
    dry_allowed_length: Annotated[int | None, _sampling("dry_allowed_length", "2")] = None
    dry_penalty_last_n: Annotated[int | None, _sampling("dry_penalty_last_n", "all")] = None
    dry_sequence_breaker: Annotated[
        list[str] | None,
        _sampler(
            help="DRY: no repetition goes beyond this text's last token; repeatable. (default: newline, colon, quote, "
            "asterisk)"
        ),
    ] = None
    min_tokens: Annotated[int, _sampling("min_tokens")] = 0
    stop_token_ids: Annotated[
        str | None,
        _sampler(metavar="1,2,3", help="End the answer with any of these tokens."),
    ] = None
    logit_bias: Annotated[str | None, _sampling("logit_bias", metavar="ID:BIAS,...")] = None
    seed: Annotated[int | None, _sampling("seed", "random")] = None

    def chosen(self) -> dict[str, Any]:
        """Return the parameters that differ from their defaults, by their names in a request.

        Raises:
            InputError: a value is out of range, or matters only with another one that is off.
        """
        found = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}
        for switch, name in _SWITCHED:
            if name in found and switch not in found:
                raise InputError(name, f"expected only with --{switch.replace('_', '-')}, without which it is off")
        for name in ("stop_token_ids", "dry_sequence_breaker"):
            found.pop(name, None)
        if "temp" in found:
            found["temperature"] = found.pop("temp")
        if self.logit_bias is not None:
            found["logit_bias"] = parse_bias(self.logit_bias)
        make_sampling(**found)
        return found

    def tokens(self) -> dict[str, Any]:
        """Return what was given of a request's fields that name tokens.

        Raises:
            InputError: a list is malformed, or a text is not UTF-8.
        """
        found: dict[str, Any] = {}
        if self.stop_token_ids is not None:
            found["stop_token_ids"] = tuple(_parse("stop_token_ids", self.stop_token_ids, int, "token ids like 1,2,3"))
        if self.dry_sequence_breaker is not None:
            for breaker in self.dry_sequence_breaker:
                if not breaker:
                    raise InputError("dry_sequence_breaker", "expected some text, found none")
                require_text("dry_sequence_breaker", breaker)
            found["dry_sequence_breakers"] = tuple(self.dry_sequence_breaker)
        return found


@dataclass(frozen=True)
class DecodeFlags:
    """The decoder and its windows."""

    decode: Annotated[
        str,
        _windows(
            "--decode",
            metavar="KIND",
            help="`ar`: one token per step. `ngram`: drafts from the text so far, `draft`: by --draft-model, and "
            "`diffusion`: from diffusion windows, all verified: the tokens of `ar`, several per step. "
            "`diffusion-fast`: WeDLM's decoder, lossy. `canvas`: block diffusion, for models trained so. `auto`: "
            "`draft` with a --draft-model, `diffusion` if the checkpoint has mask-trained weights, `canvas` if it "
            "knows nothing else, else `ar`.",
        ),
    ] = "auto"
    window: Annotated[
        str,
        _windows(
            metavar="W|auto",
            help="MASK rows per window. A full window has as many drafts beside them: W = 16 means 32 rows. `auto` "
            "chooses by measured step times.",
        ),
    ] = "auto"
    num_draft_tokens: Annotated[
        str, _windows(metavar="K|auto", help="draft, ngram: drafts per step. `auto` chooses by measured step times.")
    ] = "auto"
    entropy_threshold: Annotated[
        str,
        _windows(
            metavar="NATS|FILE:KIND",
            help="diffusion-fast: fill where the entropy is below this; or as `brigade calibrate` found for a kind of "
            "task, with its penalty.",
        ),
    ] = str(Decode.entropy_threshold)
    position_penalty: Annotated[
        float | None,
        _windows(
            help=f"diffusion-fast: nats of entropy added per position ahead. (default: {Decode.position_penalty})"
        ),
    ] = None

    canvas: Annotated[
        int | None, _windows(metavar="T", help="canvas: places per canvas; default: as the model was trained.")
    ] = None
    canvas_steps: Annotated[
        int | None,
        _windows(metavar="N", help="canvas: most steps per canvas; default: the model's own, or as many as places."),
    ] = None
    canvas_sampler: Annotated[
        str | None,
        _windows(
            metavar="entropy|confidence",
            help="canvas: decide places of a probability, or of least entropy up to a sum; default: as the model does.",
        ),
    ] = None
    canvas_threshold: Annotated[
        str | None,
        _windows(
            metavar="P,P,STEP",
            help="canvas: the least probability at first, later, and from which step (0.95,0.80,8); of `entropy` nats.",
        ),
    ] = None
    conditioning: Annotated[
        str,
        _windows(
            metavar="exact|top-64",
            help="canvas, of models that refine all places: what a step knows of the one before. `top-64` sends a "
            "fifteenth of the bytes back, for slow links, and gives another text.",
        ),
    ] = Decode.conditioning

    def decoder(self) -> Decode:
        """Raises InputError for a value out of range, or a file without such a kind of task."""
        model, threshold, penalty = self._thresholds()
        numbers = {"entropy_threshold": threshold, "position_penalty": penalty}
        made = make_decode(self.decode, **{name: getattr(self, name) for name in DECODE_FIELDS} | numbers)
        return replace(made, calibrated_on=model)

    def in_numbers(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return given fields for a server, with the numbers of a file in its place. Raises InputError as `decoder`."""
        if "entropy_threshold" not in given:
            return dict(given)
        model, threshold, penalty = self._thresholds()
        if model:  # a server may call its model by another name
            say(f"the thresholds are those of {model}")
        return {**given, "entropy_threshold": threshold} | ({"position_penalty": penalty} if model else {})

    def _thresholds(self) -> tuple[str | None, float, float]:
        """Return the model that they are of, if a file has them, the entropy threshold and the position penalty."""
        penalty = Decode.position_penalty if self.position_penalty is None else self.position_penalty
        with suppress(ValueError):
            return None, float(self.entropy_threshold), penalty
        file, colon, kind = self.entropy_threshold.rpartition(":")
        if not colon:
            expected = "expected a number of nats, or FILE:KIND of a file that `brigade calibrate` wrote"
            raise InputError("entropy_threshold", f"{expected}, got {self.entropy_threshold!r}")
        if self.position_penalty is not None:
            raise InputError("position_penalty", "expected none with --entropy-threshold FILE:KIND, which has its own")
        from coordinator.quality.calibrate import read_thresholds

        return read_thresholds(Path(file), kind)


@dataclass(frozen=True)
class PromptFlags:
    """The prompt, in one of three ways, and how the model gets it."""

    text: Annotated[str | None, typer.Argument(metavar="PROMPT", show_default=False, help="The prompt, in quotes.")] = (
        None
    )
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt as a flag; `-` reads standard input either way.")
    ] = None
    prompt_tokens: Annotated[str | None, typer.Option(metavar="1,2,3", help="The prompt as token ids.")] = None
    system_prompt: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")] = False


@dataclass(frozen=True)
class OutputFlags:
    """The output of `generate` beside the text."""

    logprobs: Annotated[
        int | None,
        _output(
            min=0, max=20, help="With --json or --journal: each token's log probability and those of the N likeliest."
        ),
    ] = None
    as_json: JsonFlag = False
    stats: Annotated[bool, _output("--stats", "-v", help="Print the time by node and by kind of work on stderr.")] = (
        False
    )
    trace: Annotated[Path | None, _output(help="Write a Chrome trace of all stages to this file.")] = None
    journal: Annotated[
        Path | None,
        _output(
            help="Save the answer in this file as it comes. If the file holds an unfinished answer, the prompt may be "
            "left out: the answer continues where it ended, with the tokens it would have had. Each step is saved, "
            "then printed: after a crash between the two, its text is missing on stdout; --json has it."
        ),
    ] = None


WINDOWS = ("decode", *DECODE_FIELDS)  # the fields of DecodeFlags


def print_json(found: Any) -> None:
    """Print the one object of --json. It is ASCII, since standard output may have any encoding."""
    print(json.dumps(found), flush=True)


def find_config(config: Path | None) -> Path | None:
    """Return the file that --config names, else ./cluster.yaml if it exists, with a line on standard error."""
    if config is None and os.path.lexists(CONFIG):  # also a folder or a dangling link, which is refused then
        say(USING_CONFIG)
        return CONFIG
    return config


def given_flags(ctx: typer.Context) -> frozenset[str]:
    """Return the parameters that were given on the command line."""
    names = [parameter.name or "" for parameter in ctx.command.params]
    sources = {name: ctx.get_parameter_source(name) for name in names}
    return frozenset(name for name, source in sources.items() if source and source.name == "COMMANDLINE")


def refuse_flags(ctx: typer.Context, names: Sequence[str], why: str) -> None:
    """Raise InputError if one of these parameters was given on the command line."""
    given = given_flags(ctx)
    for parameter in ctx.command.params:
        if parameter.name in names and parameter.name in given:
            raise InputError(field_of(parameter), why)


def refuse_drafter(ctx: typer.Context, kinds: Sequence[str]) -> None:
    """Raise InputError for a drafter, or for drafts, that none of the decoders uses."""
    if ctx.params["draft_model"] == NO_DRAFTER:
        if "ngram" not in kinds:
            refuse_flags(ctx, ("num_draft_tokens",), "not expected with --draft-model none, so that nothing drafts")
    elif not {"auto", "draft"} & set(kinds):
        why = f"not expected with --decode {','.join(kinds)}, which drafts with no model; give --decode draft"
        refuse_flags(ctx, ("draft_model",), why)


def require_other_file(field: str, target: Path | None, source: Path) -> None:
    """Raise InputError if the file to write is this one, which it would replace."""
    if target is None:
        return
    try:
        is_same = target.samefile(source)
    except OSError:  # one of them does not exist yet
        is_same = os.path.realpath(target) == os.path.realpath(source)
    if is_same:
        raise InputError(field, f"expected another file than {source}, which holds something else")


def parse_layers(text: str) -> tuple[int, ...]:
    return tuple(_parse("layers", text, int, "whole numbers like 3,2,1"))


def parse_tokens(text: str) -> tuple[int, ...]:
    return tuple(_parse("prompt_tokens", text, int, "token ids like 1,2,3", has_gaps=True))


def parse_bias(text: str) -> Mapping[int, float]:
    def pair(part: str) -> tuple[int, float]:
        token, bias = part.split(":")
        return int(token), float(bias)

    return dict(_parse("logit_bias", text, pair, "ID:BIAS pairs like 5:-1.5,7:2", has_gaps=True))


def parse_counts(field: str, text: str, *, most: int = 1_000_000) -> tuple[int, ...]:
    """Return whole numbers from 1 to `most`, ascending, without duplicates."""
    counts = _parse(field, text, _within(int, 1, most), f"whole numbers from 1 to {most} like 1,4,8")
    return tuple(sorted(set(counts)))


def parse_times(field: str, text: str, *, least: float = 0.0) -> tuple[float, ...]:
    """Return milliseconds from `least` to a million."""
    expected = f"milliseconds from {least:g} to 1000000 like 26.5,6.5"
    return tuple(_parse(field, text, _within(float, least, 1e6), expected))


def _parse(field: str, text: str, read: Callable[[str], T], expected: str, *, has_gaps: bool = False) -> list[T]:
    """Read the parts between commas; with `has_gaps`, skip empty ones.

    Raises:
        InputError: `read` raised ValueError for one of the parts.
    """
    try:
        return [read(part) for part in text.split(",") if part.strip() or not has_gaps]
    except ValueError:
        raise InputError(field, f"expected {expected}, got {text!r}") from None


def _within(read: Callable[[str], Number], least: Number, most: Number) -> Callable[[str], Number]:
    def number(part: str) -> Number:
        found = read(part)
        if not least <= found <= most:  # also true for nan
            raise ValueError(part)
        return found

    return number
