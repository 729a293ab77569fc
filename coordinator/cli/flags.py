"""The flags of the command line, one name each, for the commands to share."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.planning.objective import USUAL_REQUESTS, Objective

CLUSTER, LOAD = "Cluster", "Load"
_SAMPLING, _OUTPUT = "Sampling", "Output"

Config = Annotated[Path | None, typer.Option(help="cluster.yaml: the model and the workers.", rich_help_panel=CLUSTER)]
Model = Annotated[
    str | None,
    typer.Option(
        help="A folder, a hub repository (owner/name), or `demo`, the bundled model. (default: cluster.yaml's or demo)",
        rich_help_panel=CLUSTER,
    ),
]
Local = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=16,
        help="Start this many workers on loopback instead of using cluster.yaml's; 0 runs everything in this process.",
        rich_help_panel=CLUSTER,
    ),
]
DemoLocal = Annotated[
    int,
    # the bundled model has eight layers, of which this process takes one
    typer.Option("--local", min=1, max=7, help="How many workers to start here.", rich_help_panel=CLUSTER),
]
Layers = Annotated[
    str | None,
    typer.Option(
        metavar="3,2,1", help="Layers per node, coordinator first. (default: planned)", rich_help_panel=CLUSTER
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens per session that the plan keeps memory for. (default: 4096)", rich_help_panel=CLUSTER
    ),
]
Aims = Annotated[
    Objective,
    typer.Option(
        "--objective",
        help="What the plan is to be fast at, where the nodes' speeds are known: `latency`, one request's time per "
        f"token, or `throughput`, that of all --concurrency requests together, of {USUAL_REQUESTS} where nobody says.",
        rich_help_panel=CLUSTER,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python code that is some models' tokenizer (Kimi's), once you have read it: it may do all that "
        "you may. Without this it is neither run nor fetched.",
        rich_help_panel=CLUSTER,
    ),
]
_RECOVERY = "Recovery"
RejoinTimeout = Annotated[
    float,
    typer.Option(
        min=0,
        help="How long a lost node is awaited, seconds, before the others take its layers; where the model does not "
        "fit on them: as long as --recovery-timeout.",
        rich_help_panel=_RECOVERY,
    ),
]
RecoveryTimeout = Annotated[
    float,
    typer.Option(
        min=0,
        help="How long it may take until answers go on after a node is lost, seconds; 0: they fail at once.",
        rich_help_panel=_RECOVERY,
    ),
]

CheckFinite = Annotated[
    bool,
    typer.Option(
        "--check-finite",
        help="Have every node look for NaN and infinities in what its layers make, and name the first that finds some.",
        rich_help_panel=CLUSTER,
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
    typer.Option(
        help=f"Temperature; 0 takes the likeliest token. {_MODELS.format(0)}",
        rich_help_panel=_SAMPLING,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help=f"Sample from the likeliest tokens of this total; 0 or 1: off. {_MODELS.format('off')}",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help=f"Sample from the k likeliest tokens; 0: off. {_MODELS.format('off')}", rich_help_panel=_SAMPLING
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help=f"Sample from tokens at least this times as likely as the best; 0: off. {_MODELS.format('off')}",
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help=f"Divide the logits of the last 20 tokens; 0 or 1: off. {_MODELS.format('off')}",
        rich_help_panel=_SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float, typer.Option(help="Subtract from the logits of the last 20 tokens.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Subtract per use among the last 20 tokens.", rich_help_panel=_SAMPLING)
]
LogitBias = Annotated[
    str | None,
    typer.Option(metavar="ID:BIAS,...", help="Add to the logits of these tokens.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=2**64 - 1,
        help="The same seed gives the same tokens, on any split. (default: random)",
        rich_help_panel=_SAMPLING,
    ),
]
VerifySeed = Annotated[int, typer.Option("--seed", min=0, max=2**64 - 1, help="Of the prompts and the samples.")]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream", help="Compare with one layer after another, read from disk, even if the whole model fits here."
    ),
]

_WINDOWS, _CACHE = "Windows", "Cache"
DecodeKind = Annotated[
    str,
    typer.Option(
        "--decode",
        metavar="auto|ar|ngram|diffusion|diffusion-fast",
        help="`ar`: one token per step. `ngram`: drafts from the text so far, verified. `diffusion`: diffusion "
        "windows, verified: the tokens of `ar`, several per step. `diffusion-fast`: WeDLM's decoder, lossy. "
        "`auto`: `diffusion` if the checkpoint has mask-trained weights, else `ar`.",
        rich_help_panel=_WINDOWS,
    ),
]
Window = Annotated[
    str,
    typer.Option(
        metavar="W|auto",
        help="MASK rows per window. A full one feeds as many drafts beside them: W = 16 means 32 rows. `auto` takes "
        "what pays.",
        rich_help_panel=_WINDOWS,
    ),
]
EntropyThreshold = Annotated[
    float, typer.Option(help="diffusion-fast: fill where the entropy is below this, nats.", rich_help_panel=_WINDOWS)
]
PositionPenalty = Annotated[
    float,
    typer.Option(help="diffusion-fast: nats of entropy added per position ahead.", rich_help_panel=_WINDOWS),
]
RepeatGuard = Annotated[
    int,
    typer.Option(min=0, help="End the answer once its last tokens repeat this many times; 0: off."),
]
Kv = Annotated[
    str,
    typer.Option(
        metavar="full|rotating|int8",
        help="The KV cache: every token; the first 4 and the latest, --max-kv-size in all; every token in 8 bits, "
        "in 0.53 to 0.56 of the bytes.",
        rich_help_panel=_CACHE,
    ),
]
MaxKvSize = Annotated[
    int | None, typer.Option(min=1, help="Tokens that a rotating cache keeps.", rich_help_panel=_CACHE)
]

Json = Annotated[
    bool,
    typer.Option("--json", help="One JSON object on stdout at the end, nothing else there.", rich_help_panel=_OUTPUT),
]
Stats = Annotated[
    bool,
    typer.Option(
        "--stats",
        "-v",
        help="Where each millisecond went, by node and by kind of work, on stderr.",
        rich_help_panel=_OUTPUT,
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=20,
        help="With --json: each token's log probability and those of the N likeliest.",
        rich_help_panel=_OUTPUT,
    ),
]
Trace = Annotated[
    Path | None, typer.Option(help="Write a Chrome trace of all stages to this file.", rich_help_panel=_OUTPUT)
]

Journal = Annotated[
    Path | None,
    typer.Option(
        help="Keep the answer in this file as it comes. Run again with a file that holds the beginning of one, the "
        "prompt may be left out: the answer goes on where it ended, with the tokens it would have had. A step is kept, "
        "then printed: killed between the two, its text is missing from what was printed; --json has it.",
        rich_help_panel=_OUTPUT,
    ),
]

Concurrency = Annotated[
    str, typer.Option(metavar="1,4,8", help="How many requests at once, in turn.", rich_help_panel=LOAD)
]
NumPrompt = Annotated[
    int, typer.Option("--num-prompt", "-p", min=1, help="Tokens of each prompt.", rich_help_panel=LOAD)
]
NumTokens = Annotated[
    int, typer.Option("--num-tokens", "-g", min=2, help="Tokens of each answer.", rich_help_panel=LOAD)
]
NumTrials = Annotated[
    int, typer.Option("--num-trials", "-n", min=1, help="Trials of each; medians are shown.", rich_help_panel=LOAD)
]
Decodes = Annotated[
    str, typer.Option("--decode", metavar="ar,ngram,...", help="Decoders, as for `generate`.", rich_help_panel=LOAD)
]
Splits = Annotated[
    list[str] | None,
    typer.Option(
        "--layers",
        metavar="3,2,1",
        help="Layers per node, coordinator first; repeat it to compare splits. (default: planned)",
        rich_help_panel=CLUSTER,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(help="Draw throughput and latency over --concurrency to this image file.", rich_help_panel=_OUTPUT),
]
Wide = Annotated[
    bool,
    typer.Option(
        "--wide",
        help="All columns, as Markdown: percentiles, each stage's part, bytes sent, predictions.",
        rich_help_panel=_OUTPUT,
    ),
]
Failover = Annotated[
    bool,
    typer.Option(
        "--failover",
        help="Kill, and stop, the last worker of --local in the middle of an answer, and measure how long the reader "
        "waits; -p says how many tokens are known by then. (default: from 128 to 4096)",
    ),
]
