"""Requests to an OpenAI-compatible endpoint: retries, how JSON is asked for, and errors without secrets.

The `openai` client does the HTTP. Its own retries are off: they sleep out of reach (see [`crop_trl.retries`]).
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

try:
    import aiohttp  # noqa: F401  (carries the requests: a third less time for each)
    import openai
except ImportError as error:
    raise ImportError("Making triplets needs the extra `openai`; run `pip install 'crop-trl[openai]'`.") from error

from ..retries import Stopped, Transient, Waiting, retry_after, retrying
from ..text import Redactor
from .settings import KEY, TripletSettings

MODES = ("json_schema", "json_object", "text")
ACCOUNT_CODES = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")


class RequestFailed(RuntimeError):
    """One request got no answer; the next one may. The message begins with the cause."""

    def __init__(self, cause: str, message: str):
        super().__init__(f"{cause}: {message}")
        self.cause = cause


class RequestRefused(RequestFailed):
    """HTTP 400 and its kin: the endpoint does not want this request as it is."""


class EndpointError(RuntimeError):
    """No request will get an answer until the user changes something; the message says what."""


@dataclass(frozen=True)
class Answer:
    """What an endpoint answered, unjudged."""

    content: str | None
    refusal: str | None
    finish_reason: str | None
    usage: dict[str, Any] | None
    served_model: str | None
    response_id: str | None
    mode: str


class Client:
    """Sends chat requests to one endpoint."""

    def __init__(self, settings: TripletSettings, known_mode: str | None = None, accepted: bool = False):
        self.settings = settings
        self.redact = Redactor(*settings.secrets())
        self._modes = MODES[MODES.index(known_mode) :] if known_mode in MODES else MODES
        self.mode: str | None = None  # how JSON is asked for, once that is known
        if settings.response_format != "auto":
            self._modes, self.mode = (settings.response_format,), settings.response_format
        self.retries: Counter = Counter()  # by cause
        self.stopping = asyncio.Event()
        self.accepted = accepted  # one was answered, now or earlier: another that is turned down is a case of its own
        self._answered = False  # by this process
        self._waiting = Waiting()
        self._openai = openai.AsyncOpenAI(
            api_key=settings.api_key(),
            base_url=settings.endpoint,
            timeout=None,  # see `_send`
            max_retries=0,
            http_client=openai.DefaultAioHttpClient(),
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._openai.close()

    async def complete(self, messages: list[dict[str, str]], name: str, schema: Mapping[str, Any]) -> Answer:
        """Send a request and return its answer, whatever it says."""
        # Until one is answered, each request finds out for itself how JSON may be asked for: none waits for another.
        modes = [self.mode] if self.mode else list(self._modes)
        while True:
            mode = modes.pop(0)
            try:
                answer = await self._repeat(messages, name, schema, mode, not modes)
            except RequestFailed as error:
                stumbled = error.cause == "http_500" and self.settings.max_retries > 0
                if not (stumbled or isinstance(error, RequestRefused)):
                    raise
                if stumbled and modes and mode == self._modes[0]:
                    modes.append(mode)  # where the others fare no better, it was not for the way of asking
                modes = [other for other in modes if self.mode in (None, other)]
                if not modes:  # refused however it is asked for, or where others were not: something else is wrong
                    raise
            else:
                self.mode = min(mode, self.mode or mode, key=MODES.index)
                return answer

    async def _repeat(self, messages: list, name: str, schema: Mapping[str, Any], mode: str, last_mode: bool) -> Answer:
        body: dict[str, Any] = {**self.settings.request_fields(), "messages": messages}
        if mode == "json_schema":
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": name, "strict": True, "schema": schema},
            }
        elif mode == "json_object":
            body["response_format"] = {"type": "json_object"}
        repeat = retrying(
            self.stopping,
            longest=self.settings.max_backoff,
            attempts=lambda error: 1 + self._retry_limit(error, last_mode),
            on_wait=self._on_wait,
        )
        try:
            payload = await repeat(self._send, body)
        except Transient as error:
            if error.cause == "connection" and not self._answered:
                raise EndpointError(
                    f"`base_url` {self.settings.endpoint} does not answer ({error}); start the server or correct the "
                    "address."
                ) from None
            raise RequestFailed(error.cause, str(error)) from None
        self._answered = self.accepted = True
        return self._read(payload, mode)

    def _retry_limit(self, error: Transient, last_mode: bool) -> int:
        most = self.settings.max_retries
        # A server that never answered is more likely not there than overloaded: say so soon.
        if error.cause == "connection" and not self._answered:
            return min(most, 2)
        # Some servers stumble over a way of asking for JSON that they do not know.
        return min(most, 1) if error.cause == "http_500" and not self.mode and not last_mode else most

    def _on_wait(self, error: Transient, seconds: float) -> None:
        self.retries[error.cause] += 1
        self._waiting(error, seconds)

    async def _send(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.stopping.is_set():
            raise Stopped
        failure = None
        try:
            # `chat.completions.create` builds typed objects on both sides, which costs more time than everything else
            # here, and stumbles over endpoints whose answers lack a field or say that they are text.
            reply = self._openai.post("/chat/completions", body=body, cast_to=bytes)
            # The transport's own timeout is for one read, and there may be many.
            payload = json.loads(await asyncio.wait_for(reply, self.settings.timeout))
        except openai.APIStatusError as error:
            failure = self._status_error(error)
        except (ValueError, RecursionError):  # no JSON
            payload = None
        except Exception as error:  # the transport's own kinds, of which not all are wrapped
            failure = self._transport_error(error)
        if failure is not None:
            raise failure  # out here, where no exception of a library goes along: they hold the request's headers
        if not isinstance(payload, dict) or not _first_message(payload):
            # A gateway's error page with status 200: nobody's answer, so there is nothing to keep.
            raise Transient("the endpoint's reply was not a chat completion", "no_completion")
        if (reason := payload["choices"][0].get("finish_reason")) in ("error", "abort"):
            raise Transient(f"the endpoint broke its answer off (finish_reason {reason!r})", "broken_off")
        return payload

    def _transport_error(self, error: Exception) -> Transient:
        cause = error.__cause__ or error
        if isinstance(error, asyncio.TimeoutError):
            return Transient(f"no answer within {self.settings.timeout:g} s", "timeout")
        text = str(getattr(cause, "message", cause)) or type(cause).__name__
        text = self.redact.message(re.split(r":?\s+b['\"]", text)[0])  # what was received may hold a piece of the key
        if isinstance(error, openai.APIConnectionError):
            return Transient(text, "connection")
        return Transient(f"a reply that is no HTTP ({text})", "malformed_reply")

    def _status_error(self, error: openai.APIStatusError) -> Exception:
        status = error.status_code
        text = self.redact.message(error.message.removeprefix(f"Error code: {status} - "))
        if status == 403 and self.accepted:
            return RequestFailed("http_403", text)  # the key is good: some gateways turn single requests down so
        if status in (401, 403):
            return EndpointError(
                f"The endpoint {self.settings.endpoint} refuses the key in ${KEY} (HTTP {status}: {text}); export a "
                "valid one."
            )
        if status == 404:
            return EndpointError(
                f"`model` or `base_url` is wrong: {self.settings.endpoint} answers HTTP 404 ({text}); correct either."
            )
        if status == 402 or error.code in ACCOUNT_CODES:
            return EndpointError(f"The account has no credit left (HTTP {status}: {text}); add some and run again.")
        if status in (408, 409, 429) or status >= 500:
            cause = "rate_limit" if status == 429 else f"http_{status}"
            return Transient(f"HTTP {status}: {text}", cause, retry_after(error.response.headers))
        return RequestRefused(f"http_{status}", text)

    def _read(self, payload: dict[str, Any], mode: str) -> Answer:
        message = _first_message(payload)

        def text(value: Any) -> str | None:
            return self.redact.content(value) if isinstance(value, str) else None

        finish_reason = payload["choices"][0].get("finish_reason")
        return Answer(
            content=text(_joined(message.get("content"))),
            refusal=text(message.get("refusal")),
            finish_reason=text(finish_reason),
            usage=payload["usage"] if isinstance(payload.get("usage"), dict) else None,
            served_model=text(payload.get("model")),
            response_id=text(payload.get("id")),
            mode=mode,
        )


def _first_message(payload: Mapping[str, Any]) -> dict[str, Any] | None:
    choices = payload.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    return message if isinstance(message, dict) and message else None


def _joined(content: Any) -> Any:
    """A list of parts as the text of its text parts, `None` when it has none; anything else as it is."""
    if not isinstance(content, list):
        return content
    texts = [part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, (str, dict))]
    texts = [text for text in texts if isinstance(text, str)]
    return "".join(texts) if texts else None


def describe_request(messages: list[dict[str, str]], name: str = "", schema: Mapping[str, Any] | None = None) -> str:
    """A request for people to read."""
    parts = [f"[{message['role']}]\n{message['content']}" for message in messages]
    parts += [f"[response_format: JSON schema {name!r}]\n{json.dumps(schema)}"] if schema else []
    return "\n\n".join(parts)
