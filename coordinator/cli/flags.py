"""The flags that commands share: one name, one help text and one panel each."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from coordinator.planning.plan import USUAL_REQUESTS, Goal

CLUSTER, LOAD = "Cluster", "Load"

_cluster = partial(typer.Option, rich_help_panel=CLUSTER)
_load = partial(typer.Option, rich_help_panel=LOAD)
_server = partial(typer.Option, rich_help_panel="Server")
_recovery = partial(typer.Option, rich_help_panel="Recovery")
_sampling = partial(typer.Option, rich_help_panel="Sampling")
_windows = partial(typer.Option, rich_help_panel="Windows")
_cache = partial(typer.Option, rich_help_panel="Cache")
_output = partial(typer.Option, rich_help_panel="Output")

Config = Annotated[
    Path | None, _cluster(help="The model and the workers. (default: cluster.yaml of this folder, if it is there)")
]
Model = Annotated[
    str | None,
    _cluster(
        help="A folder, a hub repository (owner/name), or `demo`, the bundled model. (default: cluster.yaml's or demo)"
    ),
]
Local = Annotated[
    int | None,
    _cluster(
        min=0,
        max=16,
        help="Start this many workers on loopback instead of using cluster.yaml's; 0 runs everything in this process.",
    ),
]
DemoLocal = Annotated[
    int,
    # the bundled model has eight layers, of which this process takes one
    _cluster("--local", min=1, max=7, help="How many workers to start here."),
]
Layers = Annotated[
    str | None,
    _cluster(metavar="3,2,1", help="Layers per node, coordinator first. (default: planned)"),
]
Context = Annotated[
    int | None,
    _cluster(min=1, help="Tokens per session that the plan keeps memory for. (default: 4096)"),
]
Aims = Annotated[
    Goal,
    _cluster(
        "--objective",
        help="What the plan is to be fast at, where the nodes' speeds are known: `latency`, one request's time per "
        f"token, or `throughput`, that of all --concurrency requests together, of {USUAL_REQUESTS} where nobody says.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    _cluster(
        "--trust-remote-code",
        help="Run the Python code that is some models' tokenizer (Kimi's), once you have read it: it may do all that "
        "you may. Without this it is neither run nor fetched.",
    ),
]
RejoinTimeout = Annotated[
    float,
    _recovery(
        min=0,
        help="How long a lost node is awaited, seconds, before the others take its layers; where the model does not "
        "fit on them: as long as --recovery-timeout.",
    ),
]
RecoveryTimeout = Annotated[
    float,
    _recovery(
        min=0, help="How long it may take until answers go on after a node is lost, seconds; 0: they fail at once."
    ),
]

CheckFinite = Annotated[
    bool,
    _cluster(
        "--check-finite",
        help="Have every node look for NaN and infinities in what its layers make, and name the first that finds some.",
    ),
]

Text = Annotated[str | None, typer.Argument(metavar="PROMPT", show_default=False, help="What to ask, in quotes.")]
Prompt = Annotated[
    str | None, typer.Option("--prompt", "-p", help="What to ask, as a flag; `-` reads standard input either way.")
]
PromptTokens = Annotated[str | None, typer.Option(metavar="1,2,3", help="The prompt as token ids.")]
SystemPrompt = Annotated[str | None, typer.Option(help="Said to the model before the prompt.")]
Raw = Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-m", help="The most tokens to generate.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text; repeatable.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")]
PrefillStepSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=8192,
        help="The most rows of a prompt chunk. (default: by what rows cost here, so that every stage works)",
    ),
]

_MODELS = "(default: the model's, else {})"  # what its generation_config.json says, if it says that it is to be sampled
Temp = Annotated[
    float | None,
    _sampling(help=f"Temperature; 0 takes the likeliest token. {_MODELS.format(0)}"),
]
TopP = Annotated[
    float | None,
    _sampling(help=f"Sample from the likeliest tokens of this total; 0 or 1: off. {_MODELS.format('off')}"),
]
TopK = Annotated[
    int | None,
    _sampling(help=f"Sample from the k likeliest tokens; 0: off. {_MODELS.format('off')}"),
]
MinP = Annotated[
    float | None,
    _sampling(help=f"Sample from tokens at least this times as likely as the best; 0: off. {_MODELS.format('off')}"),
]
RepetitionPenalty = Annotated[
    float | None,
    _sampling(help=f"Divide the logits of the last 20 tokens; 0 or 1: off. {_MODELS.format('off')}"),
]
PresencePenalty = Annotated[float, _sampling(help="Subtract from the logits of the last 20 tokens.")]
FrequencyPenalty = Annotated[float, _sampling(help="Subtract per use among the last 20 tokens.")]
LogitBias = Annotated[
    str | None,
    _sampling(metavar="ID:BIAS,...", help="Add to the logits of these tokens."),
]
Seed = Annotated[
    int | None,
    _sampling(min=0, max=2**64 - 1, help="The same seed gives the same tokens, on any split. (default: random)"),
]
VerifySeed = Annotated[int, typer.Option("--seed", min=0, max=2**64 - 1, help="Of the prompts and the samples.")]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream", help="Compare with one layer after another, read from disk, even if the whole model fits here."
    ),
]

DecodeKind = Annotated[
    str,
    _windows(
        "--decode",
        metavar="auto|ar|ngram|diffusion|diffusion-fast",
        help="`ar`: one token per step. `ngram`: drafts from the text so far, verified. `diffusion`: diffusion "
        "windows, verified: the tokens of `ar`, several per step. `diffusion-fast`: WeDLM's decoder, lossy. "
        "`auto`: `diffusion` if the checkpoint has mask-trained weights, else `ar`.",
    ),
]
Window = Annotated[
    str,
    _windows(
        metavar="W|auto",
        help="MASK rows per window. A full one feeds as many drafts beside them: W = 16 means 32 rows. `auto` takes "
        "what pays.",
    ),
]
EntropyThreshold = Annotated[float, _windows(help="diffusion-fast: fill where the entropy is below this, nats.")]
PositionPenalty = Annotated[
    float,
    _windows(help="diffusion-fast: nats of entropy added per position ahead."),
]
RepeatGuard = Annotated[
    int,
    typer.Option(min=0, help="End the answer once its last tokens repeat this many times; 0: off."),
]
Kv = Annotated[
    str,
    _cache(
        metavar="full|rotating|int8",
        help="The KV cache: every token; the first 4 and the latest, --max-kv-size in all; every token in 8 bits, "
        "in 0.53 to 0.56 of the bytes.",
    ),
]
MaxKvSize = Annotated[int | None, _cache(min=1, help="Tokens that a rotating cache keeps.")]

Json = Annotated[
    bool,
    _output("--json", help="One JSON object on stdout at the end, nothing else there."),
]
Stats = Annotated[
    bool,
    _output("--stats", "-v", help="Where each millisecond went, by node and by kind of work, on stderr."),
]
Logprobs = Annotated[
    int | None,
    _output(min=0, max=20, help="With --json: each token's log probability and those of the N likeliest."),
]
Trace = Annotated[Path | None, _output(help="Write a Chrome trace of all stages to this file.")]

Journal = Annotated[
    Path | None,
    _output(
        help="Keep the answer in this file as it comes. Run again with a file that holds the beginning of one, the "
        "prompt may be left out: the answer goes on where it ended, with the tokens it would have had. A step is kept, "
        "then printed: killed between the two, its text is missing from what was printed; --json has it."
    ),
]

Concurrency = Annotated[str, _load(metavar="1,4,8", help="How many requests at once, in turn.")]
NumPrompt = Annotated[int, _load("--num-prompt", "-p", min=1, help="Tokens of each prompt.")]
NumTokens = Annotated[int, _load("--num-tokens", "-g", min=2, help="Tokens of each answer.")]
NumTrials = Annotated[int, _load("--num-trials", "-n", min=1, help="Trials of each; medians are shown.")]
Decodes = Annotated[str, _load("--decode", metavar="ar,ngram,...", help="Decoders, as for `generate`.")]
Splits = Annotated[
    list[str] | None,
    _cluster(
        "--layers",
        metavar="3,2,1",
        help="Layers per node, coordinator first; repeat it to compare splits. (default: planned)",
    ),
]
Plot = Annotated[
    Path | None,
    _output(help="Draw throughput and latency over --concurrency to this image file."),
]
Wide = Annotated[
    bool,
    _output("--wide", help="All columns, as Markdown: percentiles, each stage's part, bytes sent, predictions."),
]
Failover = Annotated[
    bool,
    typer.Option(
        "--failover",
        help="Kill, and stop, the last worker of --local in the middle of an answer, and measure how long the reader "
        "waits; -p says how many tokens are known by then. (default: from 128 to 4096)",
    ),
]


# What --server contradicts, and why: its model is loaded, and it does not tell its clients all that a cluster tells.
ELSEWHERE = {
    ("config", "model", "local", "layers"): "not expected with --server, which has its model loaded",
    ("stats", "trace"): "not expected with --server, which tells a client nothing of its stages",
    ("journal",): "not expected with --server, which keeps no journal for its clients",
    (
        "logprobs",
    ): "not expected with --server, which tells no token ids; its /v1 routes tell logprobs by the tokens' text",
}
ServerUrl = Annotated[
    str | None,
    _server(
        "--server",
        metavar="URL",
        help="Ask a `brigade serve` that runs, such as http://localhost:9338, instead of loading anything.",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    _server(help="Keys, a line each: KEY or NAME KEY. A server lets all of them in; a client brings the first."),
]
