"""Changes of the surface that are meant: what a test may find otherwise than it is recorded.

A change that has been made is listed until the next version, in which its alias goes and the records are made anew
(`tests/surface/record.sh CHECKOUT`). One that `may_come` need not be there yet.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """Lines that go and lines that come in one section, as patterns of whole lines."""

    what: str
    section: str
    gone: tuple[str, ...] = ()
    come: tuple[str, ...] = ()
    alias: str = ""  # how the old way is still understood, and until which version
    may_come: bool = False


_ONE = r"brigade generate --model demo --local 0 -m 2"
_IDLE = (
    "--temp 0 --top-p 0.5 Hi", "--temp 0 --seed 3 Hi", "--logprobs 2 Hi", "--json --stats Hi",
    "--raw --system-prompt Be Hi", "--prompt-tokens 1,2 --raw", "--prompt-tokens 1,2 --system-prompt Be",
    "--decode ar --window 4 Hi", "--decode ngram --window 4 Hi", "--decode ar --entropy-threshold 0.5 Hi",
    "--max-kv-size 64 Hi",
)  # fmt: skip

CHANGES = (
    Change(
        "Flags that change nothing beside the others are accepted; those that contradict each other stay refused.",
        "exits",
        gone=(
            *(f"2: {_ONE} {flags}" for flags in _IDLE),
            r"2: brigade generate --api-key-file nowhere Hi",
        ),
        come=(*(f"0 prints: {_ONE} {flags}" for flags in _IDLE), r"[03].*: brigade generate --api-key-file nowhere Hi"),
        may_come=True,
    ),
    Change(
        "A command takes ./cluster.yaml where it is there.",
        "exits",
        gone=(r"2: brigade (launch|logs mini)",),
        come=(r"2: brigade (launch|logs mini)",),
        may_come=True,
    ),
    Change(
        "null is as if the field were not there.",
        "served",
        gone=(r"asked: (all nulls|completions with nulls): 400 .*",),
        come=(r"asked: (all nulls|completions with nulls): 200",),
        may_come=True,
    ),
    Change(
        "Completions tell the log-probabilities of an echoed prompt.",
        "served",
        gone=(r"answer completions, echo and logprobs: 400 .*",),
        come=(r"answer completions, echo and logprobs.*",),
        may_come=True,
    ),
    Change(
        "smoke is an alias of the trial with which doctor ends.",
        "flags",
        gone=(r"brigade smoke.*",),
        come=(r"brigade (smoke|doctor).*",),
        alias="brigade smoke until 0.3",
        may_come=True,
    ),
    Change(
        "smoke is an alias of the trial with which doctor ends.",
        "exits",
        gone=(r".*brigade smoke.*",),
        come=(r".*brigade smoke.*",),
        may_come=True,
    ),
    Change(
        "doctor tells of its trial by a finding of its own kind.",
        "kinds",
        come=(r"doctor kind trial",),
    ),
    Change(
        "doctor tells of its trial, smoke of doctor's.",
        "printed",
        come=(r"doctor \.trial.*",),
        may_come=True,
    ),
    Change(
        "generate goes on without missing workers if the model fits on the others, and says so.",
        "exits",
        gone=(r"3: brigade generate --config absent\.yaml -m 2 Hi",),
        come=(r"0 prints: brigade generate --config absent\.yaml -m 2 Hi",),
    ),
    Change(
        "Of plans within 2 % of the best latency the fastest prompt decides: equal Macs share the layers.",
        "printed",
        gone=(r"plan, Macs that are not there \.left_out\[\]: text",),
        come=(r"plan, Macs that are not there \.left_out\[\]: empty",),
    ),
    Change(
        "Completions tell the log-probabilities of an echoed prompt, whose first token has none.",
        "served",
        gone=(
            r"answer of /v1/completions \.choices\[\]\.logprobs\.token_logprobs\[\]: number",
            r"route POST /v1/completions reads application/json \.max_tokens: integer minimum 1",
        ),
        come=(
            r"answer of /v1/completions \.choices\[\]\.logprobs\.token_logprobs\[\]: null or number",
            r"answer of /v1/completions \.choices\[\]\.logprobs\.top_logprobs\[\].*",
            r"route POST /v1/completions reads application/json \.max_tokens: integer minimum 0",
        ),
    ),
    Change(
        "top_logprobs without logprobs changes nothing and is accepted.",
        "served",
        gone=(r"asked: top_logprobs alone: 400 .*",),
        come=(r"asked: top_logprobs alone: 200",),
    ),
)
