"""Settings of the triplet pipeline, checked before anything is read or sent."""

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from ..evaluation.sampling import DecodingSettings
from ..files import json_object
from ..prompts import check_template
from ..text import is_secret
from .costs import TOKEN_FIELDS as _PRICES
from .costs import given_prices

ENGINES = ("vllm", "transformers")
OPENAI_URL = "https://api.openai.com/v1"
RESPONSE_FORMATS = ("auto", "json_schema", "json_object", "text")
KEY = "OPENAI_API_KEY"
# What has settings of its own, or would change how many answers come and in what form.
OWN_FIELDS = (
    *("model", "messages", "response_format", "temperature", "reasoning_effort", "max_completion_tokens"),
    *("n", "stream"),
)


def _option(default: Any, help: str, repr: bool = True, **more: Any) -> Any:
    return field(default=default, repr=repr, metadata={"help": help, **more})


@dataclass
class TripletSettings:
    """Where problems come from, which model is asked and how, and what is accepted.

    The API key is not a setting: it is read from an environment variable when the first request is made."""

    input: list[str] = field(
        default_factory=list,
        metadata={"help": "Files of problems (JSONL, JSON, CSV, Parquet), or hub datasets' names."},
    )
    output: str = _option("triplets", "Directory for the ledger, the triplets and the report. Rerun to resume.")
    split: str = _option("train", "Split of a hub dataset.")
    input_config: str | None = _option(None, "Configuration of a hub dataset.")
    input_revision: str | None = _option(None, "Branch, tag or commit of a hub dataset.")
    problem_column: str = _option(
        "problem", "Column of the problem: a text, or chat messages with one user turn. Dots reach into a mapping."
    )
    answer_column: str = _option("answer", "Column of the answer, dots as above; copied into the record.")
    id_column: str = _option("id", "Column of the id, dots as above; rows without one are numbered.")
    input_template: str | None = _option(
        None, "Answer-format wrapper of the input, holding {problem} once; known wrappers need not be given."
    )
    limit: int | None = _option(None, "Use the first so many rows.")
    deduplicate: bool = _option(False, "Leave out rows whose problem stands earlier; otherwise they are only reported.")

    model: str = _option("gpt-5.1", "Name of the model that writes and judges candidates.")
    critic_model: str | None = _option(None, "Another model at the same endpoint that judges.")
    engine: str | None = _option(
        None, "Load `model` (a folder or hub name) into this process instead of asking an endpoint.", choices=[*ENGINES]
    )
    engine_options: str | None = _option(
        None, """JSON object for vLLM's engine, such as '{"tensor_parallel_size": 2}'; transformers takes `dtype`."""
    )
    base_url: str | None = _option(
        None, "An OpenAI-compatible endpoint, up to and including /v1. Default: $OPENAI_BASE_URL, or OpenAI."
    )
    response_format: str = _option(
        "auto",
        "How JSON is asked for: json_schema, json_object or text. auto: the first one the endpoint takes.",
        choices=list(RESPONSE_FORMATS),
    )
    temperature: float | None = _option(None, "Sampling temperature; default: the endpoint's, with `engine` 0.7.")
    reasoning_effort: str | None = _option(None, "For reasoning models: low, medium, high, ...")
    max_completion_tokens: int | None = _option(
        None, "Longest answer. May change between runs without asking anything anew."
    )
    extra_body: str | None = _option(
        None,
        "JSON object merged into every request, for what an endpoint takes besides; an engine takes top_p and "
        "chat_template_kwargs.",
        repr=False,
    )

    rules: str | None = _option(
        None,
        "Make the counterfactuals by rule; the model rewords and solves. numbers: one number is changed.",
        choices=["numbers"],
    )
    samples: int = _option(5, "With `rules`: solutions of each text, whose share that agrees is the confidence.")
    candidates: int = _option(3, "Candidates a round, at most.")
    rounds: int = _option(2, "Rounds; from the second on the critic's reasons go along.")
    threshold: float = _option(0.85, "Smallest confidence that is accepted, for all three.")
    malformed_retries: int = _option(
        0, "Ask again this often within a round when an answer is unusable (no JSON, cut off, ...)."
    )
    domain: str = _option(
        "mathematics", "What problems and answers are: mathematics, coding, open_questions, or a YAML file of your own."
    )
    templates: str | None = _option(None, "Directory with your own template files.")

    concurrency: int = _option(64, "Requests in flight, at most.")
    timeout: float = _option(600.0, "Seconds until a request counts as lost.")
    max_retries: int = _option(8, "Repetitions of a request after rate limits and failures.")
    max_backoff: float = _option(60.0, "Longest wait between them; Retry-After goes first.")
    max_cost: float | None = _option(None, "Stop before the ledger's cost passes this many dollars.")
    price_input: float | None = _option(None, "Dollars per million input tokens.")
    price_output: float | None = _option(None, "Dollars per million output tokens.")
    price_cached_input: float | None = _option(None, "The same for cached input tokens.")
    critic_price_input: float | None = _option(None, "The same three for `critic_model`.")
    critic_price_output: float | None = _option(None, "See there.")
    critic_price_cached_input: float | None = _option(None, "See there.")

    def __post_init__(self):
        if isinstance(self.input, (str, os.PathLike)):
            self.input = [str(self.input)]
        if self.input_template is not None:
            check_template(self.input_template, "input_template")
        above_zero = (lambda value: 0 < value < math.inf, "give more than 0, or leave it out")
        not_negative = (lambda value: 0 <= value < math.inf, "give 0 or more")
        price = (not_negative[0], "give dollars per million tokens, 0 or more")
        checks = {
            **dict.fromkeys(
                ("candidates", "rounds", "concurrency", "samples"), (lambda value: value >= 1, "give at least 1")
            ),
            **dict.fromkeys(("malformed_retries", "max_retries", "max_backoff", "temperature"), not_negative),
            **dict.fromkeys(("limit", "max_completion_tokens", "max_cost", "timeout"), above_zero),
            **dict.fromkeys((f"{of}price_{name}" for of in ("", "critic_") for name in _PRICES), price),
            "threshold": (lambda value: 0 <= value <= 1, "give a number from 0 to 1"),
            "response_format": (RESPONSE_FORMATS.__contains__, f"choose one of {', '.join(RESPONSE_FORMATS)}"),
            "model": (str.strip, "name a model"),
            "critic_model": (str.strip, "name a model, or leave it out"),
            "engine": (ENGINES.__contains__, "choose vllm or transformers, or leave it out"),
            "rules": ("numbers".__eq__, "choose numbers, or leave it out"),
        }
        for name, (check, remedy) in checks.items():
            value = getattr(self, name)
            _require(value is None or check(value), name, value, remedy)
        self.extra_fields()
        self._check_engine()
        if self.rules:
            self.response_format = "text"  # a paraphrase and a solution are no JSON
        given_prices(vars(self))
        try:
            url = urlsplit(self.endpoint)
            reachable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:  # brackets that do not close, a port that is no number
            url, reachable = urlsplit(""), False
        # Whatever stands in a URL ends up in logs and in the run's files.
        if url.username or url.password or url.query:
            raise ValueError(
                f"`base_url` must not carry a user name, password or query string; put the key into ${KEY} and give "
                "the bare address."
            )
        _require(
            self.engine or reachable, "base_url", self.endpoint, "give an address such as http://127.0.0.1:8000/v1"
        )

    def _check_engine(self) -> None:
        if not self.engine:
            return _require(self.engine_options is None, "engine_options", self.engine_options, "give `engine` too")
        _require(not self.base_url, "base_url", self.base_url, "leave it out, or `engine`, which needs none")
        _require(self.model != type(self).model, "model", self.model, "with `engine`, give a folder or a hub name")
        others = self.extra_fields().keys() - {"top_p", "chat_template_kwargs"}
        _require(not others, "extra_body", sorted(others), "an engine takes top_p and chat_template_kwargs alone")
        self.engine_fields(), self.decoding()

    @property
    def endpoint(self) -> str:
        """The address that requests go to, or the name of the engine."""
        return self.engine or self.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL

    def api_key(self) -> str:
        """The key from the environment; a placeholder for endpoints other than OpenAI's, which may not want one."""
        key = os.environ.get(KEY, "").strip()
        if not all("!" <= character <= "~" for character in key):
            raise ValueError(
                f"${KEY} holds something that no key has, such as a space, a line end or a quotation mark from a text "
                "program; export the bare key."
            )
        if not key and self.endpoint.rstrip("/") == OPENAI_URL:
            raise ValueError(f"${KEY} is not set; export your API key under that name and run again.")
        return key or "no-key"

    def secrets(self) -> list[str]:
        """What no file, log or message may hold: the key, and what `extra_body` has under names such as `api_key`."""

        def found(value: Any, name: str) -> list[str]:
            if isinstance(value, dict):
                return [secret for own, inner in value.items() for secret in found(inner, own)]
            if isinstance(value, list):
                return [secret for inner in value for secret in found(inner, name)]
            return value.split() if isinstance(value, str) and is_secret(name) else []

        return [self.api_key(), *found(self.extra_fields(), "")]

    def extra_fields(self) -> dict[str, Any]:
        """`extra_body` as a mapping."""
        fields = json_object("extra_body", self.extra_body, '{"top_p": 0.9}')
        for name in fields:
            if name in OWN_FIELDS:
                raise ValueError(f"`extra_body` may not hold {name!r}; take it out, or give the setting of that name.")
        return fields

    def engine_fields(self) -> dict[str, Any]:
        """`engine_options` as a mapping."""
        return json_object("engine_options", self.engine_options, '{"gpu_memory_utilization": 0.8}')

    def decoding(self) -> DecodingSettings:
        """How an engine draws its answers."""
        given = {"temperature": self.temperature, "max_tokens": self.max_completion_tokens}
        return DecodingSettings(**self.extra_fields(), **{k: v for k, v in given.items() if v is not None})

    def for_kind(self, kind: str) -> "TripletSettings":
        """As requests of this kind are made: the critic may be another model."""
        other = self.critic_model if kind == "critic" else None
        return replace(self, model=other, critic_model=None) if other else self

    def sampling(self) -> dict[str, Any]:
        """What shapes an answer besides model and messages; part of a request's key, as length limits are not."""
        fields = {"temperature": self.temperature, "reasoning_effort": self.reasoning_effort}
        return {name: value for name, value in fields.items() if value is not None} | self.extra_fields()

    def request_fields(self) -> dict[str, Any]:
        """What all requests have in common besides the form of the answer."""
        limit = {} if self.max_completion_tokens is None else {"max_completion_tokens": self.max_completion_tokens}
        return {"model": self.model, **self.sampling(), **limit}


def _require(condition: Any, name: str, value: Any, remedy: str) -> None:
    if not condition:
        raise ValueError(f"`{name}` is {value!r}; {remedy}.")
