"""A client of `brigade serve`, or of another server with OpenAI's API."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2

from coordinator.api.auth import first_key
from coordinator.cli.flags import ServerFlags, print_json
from coordinator.cli.show import Printer
from coordinator.cluster.progress import say
from coordinator.sessions.output import Answer, Output, Usage
from coordinator.sessions.request import Conversation, Prompt
from worker.errors import BrigadeError, ContextExceeded, InputError, ServerFailed
from worker.platform.text import Json, counted, json_bytes

if TYPE_CHECKING:
    from coordinator.cli.generate import GenerateOptions


_CERTIFICATES = "SSL_CERT_FILE"
_OTHER_HOST = (62, 64)  # OpenSSL's codes for a host name or IP address that the certificate does not have
_NOT_TLS = "WRONG_VERSION_NUMBER"  # OpenSSL's word for bytes that are no record of TLS
_TIMES = httpx2.Timeout(5.0, read=120.0)  # a stream sends keep-alives every few seconds
_WRONG_REQUEST = (400, 404, 413, 415, 422)
_TOO_LONG = b'"context_length_exceeded"'  # the code of a refusal
_TOO_MANY = 429
_RETRY_S, _MOST_RETRY_S = 1.0, 60.0  # until a busy server is asked again: if it names no time, and at most
_NOT_CONNECTED = (httpx2.ConnectError, httpx2.ConnectTimeout)
_JSON = {"Content-Type": "application/json"}
_DONE = "[DONE]"


class NothingAnswers(ServerFailed):
    """No server listens at the address."""


class ServerBusy(ServerFailed):
    """The server answers as many requests as it may, in all or of this key; another one may be asked for later."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


def client_settings(url: str, key: str | None) -> Json:
    """Return the arguments of an httpx client, synchronous or not, for this server.

    Raises:
        InputError: the URL is malformed, or the file of trusted certificates cannot be read.
    """
    expected = f"expected http://HOST:PORT, got {url!r}"
    if not url.startswith(("http://", "https://")):
        raise InputError("server", expected)
    try:
        base = httpx2.URL(url.rstrip("/").removesuffix("/v1") + "/")
    except httpx2.InvalidURL as error:
        raise InputError("server", f"{expected} ({error})") from error
    verify: ssl.SSLContext | bool = False
    if url.startswith("https://"):
        try:
            verify = httpx2.create_ssl_context()  # reads the environment's variables for certificates
        except OSError as error:
            path = os.environ.get(_CERTIFICATES)
            raise InputError("", f"{_CERTIFICATES} names {path}, which holds no certificates ({error})") from error
    return {
        "base_url": base,
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "verify": verify,
        "trust_env": False,  # no proxies
    }


def no_answer(url: str, error: Exception, advice: str = "start a server by `brigade serve`") -> ServerFailed:
    """Return the error of a server that does not answer: NothingAnswers, or plain HTTP, or an untrusted certificate."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if getattr(cause, "reason", "") == _NOT_TLS:
        return ServerFailed(f"{url} answers, but does not speak TLS: try http:{url.partition(':')[2]}")
    if not isinstance(cause, ssl.SSLCertVerificationError):
        if isinstance(error, httpx2.RemoteProtocolError) and url.startswith("http:"):
            advice += f", or ask it by TLS at https:{url.partition(':')[2]}"
        return NothingAnswers(f"nothing answers at {url} ({str(error) or type(error).__name__}): {advice}")
    if cause.verify_code in _OTHER_HOST:
        return ServerFailed(f"{cause.verify_message}: ask {url} by a name that its certificate has")
    return ServerFailed(
        f"the certificate of {url} is not trusted ({cause.verify_message}): if it is your own, let "
        f"{_CERTIFICATES} name its PEM file (--tls-cert of the server)"
    )


def unauthorised(url: str, key: str | None) -> InputError:
    """Return the error for a key that a server refuses, or for none."""
    if key:
        return InputError("server", f"{url} refuses the key of --api-key-file or BRIGADE_API_KEY: give one of its own")
    return InputError("server", f"{url} wants a key: give --api-key-file, or set BRIGADE_API_KEY")


class RemoteServer:
    """One model of a server. Made by `open_server`."""

    def __init__(self, client: httpx2.AsyncClient, url: str, name: str) -> None:
        self._client = client
        self._url = url
        self.name = name

    async def generate(self, prompt: Prompt, body: Mapping[str, Any]) -> AsyncGenerator[Output, None]:
        """Ask for an answer, and yield its outputs as they come, without tokens; the last one ends the answer.

        Closing the iterator ends the request.

        Args:
            body: further fields of the request.
        Raises:
            InputError: the request is wrong. NothingAnswers: the server has ended. ServerFailed: the answer failed or
                broke off.
        """
        path, asked = "v1/completions", {**body, "prompt": prompt}
        if isinstance(prompt, Conversation):
            path, asked = "v1/chat/completions", {**body, "messages": list(prompt.messages)}
        started, finish_reason = time.monotonic_ns(), "stop"
        usage = Usage(started=started)
        async with aclosing(self._events(path, asked)) as events:
            async for event in events:
                now = time.monotonic_ns()
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {"content": choice.get("text")}
                    text, finish_reason = delta.get("content") or "", choice.get("finish_reason") or finish_reason
                    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                    if text or reasoning:
                        yield Output(text, (), now, content=text, reasoning=reasoning)
                if found := event.get("usage"):
                    usage = _usage(started, found, event.get("brigade") or {})
        yield Output("", (), time.monotonic_ns(), finish_reason, usage)

    async def score(self, prompt: str, continuations: Sequence[str]) -> list[float]:
        """Return the log-probability of each continuation. Raises as `generate`."""
        try:
            asked = {"model": self.name, "prompt": prompt, "continuations": list(continuations)}
            response = await self._client.post("v1/score", content=json_bytes(asked), headers=_JSON)
            if response.status_code != 200:
                raise _refused(response, response.content)
            return [float(each["logprob"]) for each in response.json()["scores"]]
        except _NOT_CONNECTED as error:
            raise no_answer(self._url, error) from error
        except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ServerFailed(f"the server at {self._url} has no scores: {error or type(error).__name__}") from error

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Json, None]:
        asked = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}, **body}
        how: Json = {"method": "POST", "content": json_bytes(asked), "headers": _JSON, "max_event_size": None}
        try:
            async with self._client.sse(path, **how) as events:
                if events.response.status_code != 200:
                    raise _refused(events.response, await events.response.aread())
                async for event in events:
                    if event.data.strip() == _DONE:
                        return
                    if event.data:
                        yield _event(event.data)
        except _NOT_CONNECTED as error:
            raise no_answer(self._url, error) from error
        except (httpx2.HTTPError, ValueError) as error:
            raise ServerFailed(f"the server at {self._url} broke off: {error or type(error).__name__}") from error
        raise ServerFailed(f"the server at {self._url} ended its stream without a last event")


@asynccontextmanager
async def open_server(given: ServerFlags) -> AsyncIterator[RemoteServer]:
    """Open a client and ask for the name of the server's model.

    Raises:
        InputError: the URL is malformed, or the server refuses the key. ServerFailed: no such server answers.
    """
    assert given.server is not None
    url, key = given.server, first_key(given.api_key_file)
    async with httpx2.AsyncClient(**client_settings(url, key), timeout=_TIMES) as client:
        try:
            response = await client.get("v1/models")
            if response.status_code == 401:
                raise unauthorised(url, key)
            reason, _ = error_in(response.content)
            if response.status_code != 200 and reason:
                raise ServerFailed(f"{url} answers with status {response.status_code}: {reason}")
            response.raise_for_status()
            name = str(response.json()["data"][0]["id"])
        except httpx2.TransportError as error:
            raise no_answer(url, error) from error
        except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
            said = f"{url} answers, but not as a server of OpenAI's API does"
            raise ServerFailed(f"{said} ({str(error) or type(error).__name__})") from error
        yield RemoteServer(client, url, name)


def _event(text: str) -> Json:
    event = json.loads(text)
    if not isinstance(event, dict):
        raise ValueError(f"expected an object, found {text[:40]!r}")
    if error := event.get("error"):
        raise ServerFailed(_error_message(error))
    return event


def error_in(body: bytes) -> tuple[str, str]:
    """Return the text of an answer's `error` field, and the field of the request at fault; each empty if unknown."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, LookupError, TypeError, RecursionError):
        error = None
    if not error:
        return "", ""
    return _error_message(error), str(error.get("param") or "") if isinstance(error, dict) else ""


def _error_message(error: Any) -> str:
    """Return the text of an `error` field: OpenAI's is an object with a message, other servers send a plain text."""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _usage(started: int, usage: Mapping[str, Any], own: Mapping[str, Any]) -> Usage:
    """Return the usage that a server reports; `own` is the `brigade` object of our own servers."""
    try:
        num_prompt, generated = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        expected = "expected prompt_tokens and completion_tokens, two numbers, in the usage that the server reports"
        raise ServerFailed(f"{expected}; found {json.dumps(usage)[:200]}") from error
    steps, rows, recoveries = (own.get(name, 0) for name in ("steps", "rows", "recoveries"))
    return Usage(num_prompt, started, reused, steps, rows, num_recoveries=recoveries, num_generated=generated)


def _refused(response: httpx2.Response, body: bytes) -> BrigadeError:
    status = response.status_code
    message, field = error_in(body)
    message = message or f"HTTP status {status}"
    if status in _WRONG_REQUEST:
        kind = ContextExceeded if _TOO_LONG in body else InputError
        return kind(field, message.removeprefix(f"{field}: "))
    said = f"the server answers with status {status}: {message}"
    if status == _TOO_MANY:
        seconds = response.headers.get("Retry-After", "")
        return ServerBusy(said, min(float(seconds), _MOST_RETRY_S) if seconds.isdecimal() else _RETRY_S)
    return ServerFailed(said)


async def run_remote(given: ServerFlags, body: Mapping[str, Any], asked: GenerateOptions) -> None:
    """Print one answer of a server, as `generate --server` does: its text as it comes, then its statistics.

    Raises:
        InputError: the request is wrong. ServerFailed: no server answers, or the answer failed.
    """
    prompt = asked.require_prompt()
    answer = Answer()
    async with open_server(given) as server:
        with Printer(is_silent=asked.output.as_json) as printer:
            async with aclosing(server.generate(prompt, body)) as outputs:
                async for output in outputs:
                    printer.write(output.content)
                    answer.add(output)
    found = answer_as_json(answer)
    if asked.output.as_json:
        print_json(found)
        return
    stats = found["stats"]
    speed = f", {stats['tokens_per_s']:.1f} tok/s" if stats["tokens_per_s"] else ""
    tokens, first = counted(stats["num_tokens"], "token"), f"first after {stats['ttft_s']:.3f} s"
    say(f"{tokens}{speed}; {first}, by {server.name} at {given.server}")


def answer_as_json(answer: Answer) -> Json:
    """Return what `generate --server --json` prints: a server sends no token ids and no times of its stages."""
    usage, later_s = answer.usage, answer.later_s
    ttft_s = (answer.first_text_at - usage.started) / 1e9
    stats = {
        "ttft_s": ttft_s,
        "decode_s": later_s,
        "tokens_per_s": answer.num_later / later_s if later_s and answer.num_later else None,
        "prompt_tokens_per_s": usage.prompt_tokens_per_s(ttft_s),
        "num_tokens": usage.num_generated,
        "reused_tokens": usage.num_reused,
        "recoveries": usage.num_recoveries,
    }
    return {
        "text": answer.text, "tokens": None, "prompt_tokens": usage.num_prompt, "finish_reason": answer.finish_reason,
        "logprobs": None, "stats": stats, "stages": [],
    }  # fmt: skip
