"""Chat templates are untrusted code: transformers renders them in a process with limits of time, text and memory."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import psutil
import pytest
from mlx_lm import tokenizer_utils
from transformers import tokenization_utils_base
from transformers.utils import chat_template_utils

from coordinator.cli.generate import GenerateOptions, prepare
from coordinator.cluster.options import cluster_options
from coordinator.engine import bounded
from coordinator.engine import tokenizer as tokenizer_module
from coordinator.engine.bounded import GIVE_RAW, TEMPLATES, Bounds, Templates, send
from coordinator.engine.tokenizer import Tokenizer
from tests.cluster.commands import run_here
from tests.cluster.models import reconfigured_copy
from worker.errors import InputError
from worker.model.checkpoint import Checkpoint

SETTINGS = "tokenizer_config.json"
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
FUNCTION = {
    "name": "weather",
    "description": "Wie ist das Wetter? <b>&amp;</b>",
    "parameters": {"properties": PROPERTIES},
}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 3}}}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be kind.\n"},
    {"role": "user", "content": "日本語 🙂 <|im_end|> 'quoted' \"twice\""},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nnaïve", "tool_calls": [CALL]},
    {"role": "assistant", "content": "Cold.", "reasoning": "It is below zero."},
    {"role": "user", "content": [{"type": "text", "text": "And tomorrow?"}, {"type": "image"}]},
]
# Templates as models have them, shortened: each has something that not all renderers know.
LLAMA = """{{- bos_token }}{{- "Today Date: " + strftime_now("%d %b %Y") }}
{%- for t in tools or [] %}{{- t | tojson(indent=4) }}{%- endfor %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}{{ message.tool_calls[0].function.arguments | tojson }}
    {%- else %}{{- '<|' + message['role'] + '|>' }}{{ message['content'] | string | trim }}{%- endif %}
{%- endfor %}"""
QWEN = """{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == "user" %}{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {{- message.role + ': ' + content.split('</think>')[-1].lstrip('\\n') + (message.reasoning_content or '') + '\\n' }}
    {%- if loop.index0 == ns.last %}{{- '(the last)' }}{%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""
MISTRAL = """{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate') }}{% endif %}[INST] {{ message['content'] }}{% endfor %}"""
TRACKED = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}
{% endgeneration %}{% else %}{{ tools | tojson }} {{ m.content }}{% endif %}{% endfor %}"""
SAYS = "{{ messages[0].content }}"
NAMED = [{"name": "default", "template": LLAMA}, {"name": "tool_use", "template": QWEN}]
ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ strftime_now.__globals__['datetime'] }}", "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ messages.append(1) }}", "{% import 'os' as os %}{{ os }}", "{% include 'passwd' %}",
)  # fmt: skip
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DEEP_IN_C = "{{ 10 ** (10 ** 9) }}"
DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.fixture(scope="module")
def short() -> Templates:
    return Templates(Bounds(seconds=2.0, text_bytes=1 << 20, memory_bytes=64 << 20))


@pytest.fixture(scope="module")
def small() -> Templates:
    """Bounded in text and memory; no busy machine reaches the limit of time."""
    return Templates(Bounds(seconds=60, text_bytes=1 << 20, memory_bytes=64 << 20))


def render(templates: Templates, template: str, **arguments: Any) -> Any:
    return templates.render(**{"chat_template": template, "conversations": [CONVERSATION]} | arguments)


def refusal(templates: Templates, template: str, **arguments: Any) -> str:
    with pytest.raises(InputError) as caught:
        render(templates, template, **arguments)
    message = str(caught.value)
    assert message.startswith("prompt: the chat template ") and "give it raw" in message
    assert "\n" not in message and message.isprintable()
    return message


def assert_works(templates: Templates) -> None:
    assert render(templates, SAYS, conversations=[HELLO]) == (["hi"], [])


def processes() -> list[psutil.Process]:
    """Return the child processes that render templates."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            found += [child] if "coordinator.engine.bounded" in child.cmdline() else []
    return found


def render_by(patch: pytest.MonkeyPatch, render: Callable[..., Any]) -> None:
    """Let tokenizers that this process makes from now on render with this function."""
    patch.setattr(tokenization_utils_base, "render_jinja_template", render)  # to be put back in the end
    patch.setattr(tokenizer_module, "TEMPLATES", SimpleNamespace(render=render))


def test_text_and_generated_spans_are_those_of_transformers() -> None:
    arguments = {"conversations": [CONVERSATION], "chat_template": TRACKED, "eos_token": "</s>", "tools": [TOOL]}
    arguments["return_assistant_tokens_mask"] = True
    texts, generated = chat_template_utils.render_jinja_template(**arguments)
    assert TEMPLATES.render(**arguments) == ([*texts], [[list(span) for span in spans] for spans in generated])
    assert all(texts) and all(generated)


def test_what_a_template_refuses_is_told_in_one_line_and_the_sandbox_stays_closed() -> None:
    for template, said in (
        (MISTRAL, "Conversation roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].function.name }}", "has no attribute 'function'"),
        (r"{{ '\ud800' }}", "surrogates not allowed"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth exceeded"),
        (r"{{ raise_exception('\x1b[2J no') }}", r"( [2J no)"),
    ):
        assert said in refusal(TEMPLATES, template)
    for template in ESCAPES:
        refusal(TEMPLATES, template)
    for value in ("\ud800", 2**64, object()):
        with pytest.raises(InputError, match=r"^prompt: expected values that JSON has, in UTF-8; "):
            render(TEMPLATES, SAYS, conversations=[[{"role": "user", "content": value}]])


def test_a_template_that_is_endless_in_c_is_ended_and_the_next_request_is_served(short: Templates) -> None:
    assert re.search(r"took longer than (0\.5|2) s; give it raw .*, or shorter$", refusal(short, DEEP_IN_C))
    assert_works(short)


@pytest.mark.parametrize("template", [DOUBLING, f"{{{{ 'a' * {10**12} }}}}"], ids=["bit by bit", "at once"])
def test_memory_ends_at_its_bound(small: Templates, template: str) -> None:
    assert refusal(small, template).endswith(f"took more than 64 MiB of memory; {GIVE_RAW}, or shorter")
    assert_works(small)


def test_memory_ends_at_its_bound_where_the_system_does_not_enforce_it(monkeypatch: pytest.MonkeyPatch) -> None:
    unbounded = Bounds(seconds=30, memory_bytes=1 << 40)
    monkeypatch.setattr(Bounds, "as_arguments", lambda bounds: [str(n) for n in vars(unbounded).values()])
    templates = Templates(Bounds(seconds=30, memory_bytes=100 << 20))
    assert "took more than 100 MiB of memory" in refusal(templates, DOUBLING.replace("40", "28") + ENDLESS)


def test_text_ends_at_its_bound_and_long_conversations_pass_up_to_the_usual_one(small: Templates) -> None:
    assert "made more than 1 MiB of text" in refusal(small, f"{{{{ 'a' * {1 << 20} }}}}")
    assert len(render(small, f"{{{{ 'é' * {(1 << 19) - 100} }}}}")[0][0]) == (1 << 19) - 100
    conversation = [{"role": "user", "content": "日本🙂 " * 600_000}]
    assert render(TEMPLATES, SAYS, conversations=[conversation])[0] == [conversation[0]["content"]]
    message = refusal(TEMPLATES, SAYS, conversations=[[{"role": "user", "content": "a" * (8 << 20)}]])
    assert "made more than 8 MiB of text" in message
    assert_works(TEMPLATES)


def test_a_process_that_stands_still_is_replaced(short: Templates) -> None:
    assert_works(short)
    for process in processes():  # all: which is whose does not matter
        process.suspend()
    assert "took longer than 2 s" in refusal(short, SAYS)
    assert_works(short)
    for process in processes():
        process.resume()


@pytest.mark.parametrize("times", [1, 2])
def test_a_request_whose_process_dies_is_retried(small: Templates, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    left = times

    def send_and_kill(stream: IO[bytes], message: bytes) -> None:
        nonlocal left
        send(stream, message)
        left -= 1
        for process in processes() if left >= 0 else ():
            process.kill()

    assert_works(small)
    for process in processes():  # between two requests
        process.kill()
    assert_works(small)
    monkeypatch.setattr(bounded, "send", send_and_kill)
    if times == 2:
        assert "ended its process 2 times" in refusal(small, ENDLESS)
    assert_works(small)


def test_many_at_once_get_each_their_own_from_one_process() -> None:
    assert_works(TEMPLATES)
    before = processes()

    def ask(number: int) -> Any:
        return render(TEMPLATES, SAYS, conversations=[[{"role": "user", "content": f"{number} " * number}]])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(100))) == [([f"{number} " * number], []) for number in range(100)]
    assert processes() == before


def test_the_process_knows_the_time_and_little_else_and_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_the_east() -> str:
        return datetime.now(timezone(timedelta(hours=12))).strftime("%d %H:%M")

    monkeypatch.setenv("TZ", "ABC-12")  # twelve hours east of Greenwich
    monkeypatch.setenv("HF_TOKEN", "secret")
    others, templates = processes(), Templates()
    before, [[text], _], after = in_the_east(), render(templates, "{{ strftime_now('%d %H:%M') }}"), in_the_east()
    assert text in (before, after)
    [process] = [each for each in processes() if each not in others]
    assert process.cwd() == "/" and "secret" not in process.environ().values()
    assert not process.net_connections() and process.num_threads() == 1
    if sys.platform == "linux":
        assert 0 < process.rlimit(psutil.RLIMIT_AS)[1] < process.memory_info().vms + Bounds().memory_bytes + (1 << 20)
    assert os.getsid(process.pid) == process.pid, "Ctrl-C in a terminal does not reach it"
    del templates
    assert not psutil.pid_exists(process.pid), "not even as a zombie"


def test_an_endless_template_ends_without_its_process() -> None:
    templates = Templates()
    templates.render(conversations=[[]], chat_template="a")
    process = templates.process
    with pytest.raises(InputError, match=r"the chat template took longer than (0\.5|2) s"):
        templates.render(conversations=[[]], chat_template=ENDLESS)
    assert templates.render(conversations=[[]], chat_template="b") == (["b"], []) and templates.process is process


ENDS = """
import os, sys
from coordinator.engine.bounded import Bounds, Templates, receive, send
import msgpack
templates = Templates(Bounds(seconds=0.1))
templates.start()
process = templates.process
print(process.pid, flush=True)
receive(process.stdout)
if "busy" in sys.argv:
    send(process.stdin, msgpack.packb({"conversations": [[]], "chat_template": sys.argv[2]}))
if "killed" in sys.argv:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("end", "state"), [("killed", "busy"), ("at its end", "idle"), ("at its end", "busy")])
def test_no_process_outlives_the_coordinator(end: str, state: str) -> None:
    command = [sys.executable, "-W", "error", "-c", ENDS, end, DEEP_IN_C, state]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL if end == "killed" else 0, "")
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(done.stdout)):
        assert time.monotonic() < deadline and end == "killed"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "settings",
    [
        {"chat_template": QWEN},
        {"chat_template": LLAMA, "bos_token": "<eos>"},
        {"chat_template": NAMED},
        {"chat_template_type": "deepseek_v32"},
    ],
    ids=["Qwen", "Llama", "named", "Python of mlx-lm's"],
)
def test_the_tokens_are_those_of_mlx_lm(talker: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = reconfigured_copy(talker, tmp_path / "model", SETTINGS, **settings)
    wrapper = tokenizer_utils.load(folder)
    messages = [{"role": "user", "content": "日本 <end> hi", "name": None}]
    more: list[dict[str, Any]] = [
        {}, {"add_generation_prompt": False}, {"enable_thinking": False}, {"tools": []}, {"tools": [TOOL]},
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:  # transformers as it is without us
        patch.setattr(tokenization_utils_base, "render_jinja_template", chat_template_utils.render_jinja_template)
        expected = [wrapper.apply_chat_template(messages, **{"add_generation_prompt": True} | each) for each in more]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "_compile_jinja_template", None)  # nothing of it runs in this process
        tokenizer = Tokenizer(Checkpoint("", folder, {}, {}))
        found = [tokenizer.encode_chat(messages, (), each) for each in more]
    assert found == [list(tokens) for tokens in expected]
    assert min(map(len, found)) > 10


@pytest.mark.parametrize(
    ("settings", "messages", "said"),
    [
        ({"chat_template": MISTRAL}, [], "Cannot apply chat template to an empty conversation"),
        ({"chat_template": NAMED[1:]}, HELLO, "multiple chat templates with no default"),
        ({"chat_template_type": "deepseek_v32"}, [{"role": "king"}], "Unknown role: king"),
    ],
)
def test_a_refused_conversation_is_an_input_error_and_arguments_reach_the_template_only(
    talker: Path, tmp_path: Path, settings: dict[str, Any], messages: Any, said: str
) -> None:
    folder = reconfigured_copy(talker, tmp_path / "model", SETTINGS, **settings)
    tokenizer = Tokenizer(Checkpoint("", folder, {}, {}))
    with pytest.raises(InputError, match=f"^prompt: the chat template refuses this conversation .*{said}"):
        tokenizer.encode_chat(messages)
    for name in ("chat_template", "return_dict", "truncation", "conversation", "messages"):
        with pytest.raises(InputError, match=f"^chat_template_kwargs: {name} is not the chat template's"):
            tokenizer.encode_chat(HELLO, (), {name: None})


def test_a_command_can_be_interrupted_while_a_template_is_rendered_and_tells_of_one_that_took_too_long(
    talker: Path, tmp_path: Path, short: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    async def interrupt() -> None:
        asked, loop = asyncio.Event(), asyncio.get_running_loop()

        def wait(**arguments: Any) -> Any:
            loop.call_soon_threadsafe(asked.set)
            released.wait(10)
            return [""], []

        render_by(monkeypatch, wait)
        options = cluster_options(None, str(talker), 0)
        task = asyncio.ensure_future(prepare(GenerateOptions(prompt="hi"), options))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not released.is_set()

    asyncio.run(interrupt())
    released.set()
    render_by(monkeypatch, short.render)
    folder = reconfigured_copy(talker, tmp_path / "model", SETTINGS, chat_template=ENDLESS)
    outcome = run_here("generate", "--model", folder, "--local", "0", "--prompt", "hi")
    told = r"error: --prompt: the chat template took longer than (0\.5|2) s; give it raw .*, or shorter\n"
    assert (outcome.code, outcome.out) == (2, "") and re.fullmatch(told, outcome.err)
