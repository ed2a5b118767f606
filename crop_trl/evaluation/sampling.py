"""Three ways to sample responses: Hugging Face generate, vLLM in this process, any OpenAI-compatible server.

A sampler takes prompts and one seed for each and returns responses in order. vLLM and servers take a seed per request;
Hugging Face generate has one random state, which is seeded per batch from the batch's own seeds, so that an interrupted
run goes on as if it had not been.
"""

import hashlib
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from typing import Any, Protocol

from ..prompts import prompt_text
from ..retries import Stopped, Transient, Waiting, retry_after, retrying
from ..text import Redactor

OPEN_THINK = "<think>"
_ATTEMPTS, _LONGEST_PAUSE = 6, 60.0  # of a request to a server; seconds


@dataclass(frozen=True)
class DecodingSettings:
    """How problems are put to a model and responses drawn; temperature 0 is greedy."""

    temperature: float = 0.7
    top_p: float = 0.95
    max_tokens: int = 31_744
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    conversational: bool = True

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"`temperature` is {self.temperature}: choose 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` is {self.top_p}: choose a number in (0, 1].")
        if self.max_tokens < 1:
            raise ValueError(f"`max_tokens` is {self.max_tokens}: choose at least 1.")


# The paper's two settings differ in the thinking mode.
SETTINGS = {"A": {"enable_thinking": True}, "B": {"enable_thinking": False}}


@dataclass(frozen=True)
class Response:
    """A response with its thinking part, its length (`None`: not told), whether the limit ended it."""

    text: str
    tokens: int | None
    truncated: bool


Done = Callable[[int, Response], None]


class Sampler(Protocol):
    """What evaluation needs of a sampler."""

    batch_size: int
    # Whether a response depends on its prompt and seed alone, so that single missing ones can be drawn later.
    independent: bool

    def sample(self, prompts: Sequence[str], seeds: Sequence[int], done: Done) -> None:
        """Draw one response for each prompt, with its seed; `done(index, response)` is called as each is ready."""


def is_plain(tokenizer, settings: DecodingSettings) -> bool:
    """Whether prompts are plain text, to which the tokenizer adds what begins one."""
    return tokenizer.chat_template is None or not settings.conversational


def render(tokenizer, prompt: str | list[dict[str, str]], settings: DecodingSettings) -> tuple[str, bool]:
    """A user's turn, or messages, as the model reads it, and whether it ends in an open thinking part, which belongs to
    the response."""
    if is_plain(tokenizer, settings):
        return prompt_text(prompt), False
    turn = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    options = settings.chat_template_kwargs
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, **options)
    return text, text.rstrip().endswith(OPEN_THINK)


class TransformersSampler:
    """Hugging Face generate; `dtype` of the weights is bfloat16 on an accelerator and float32 elsewhere by default.
    Another thread ends a batch at its next token by setting `stopped`."""

    independent = False
    stopped = False

    def __init__(self, model: str, settings: DecodingSettings, batch_size: int = 32, dtype=None, revision=None):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.settings, self.batch_size = settings, batch_size
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
        chosen = dtype or ("float32" if device.type == "cpu" else "bfloat16")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, padding_side="left")
            weights = AutoModelForCausalLM.from_pretrained(model, revision=revision, dtype=getattr(torch, chosen))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines() or [""]
            why = f"{type(error).__name__}: {reason[0][:200]}"
            raise ValueError(f"`--model` {model!r} cannot be loaded ({why}); give a model's folder or name.") from None
        self.model = weights.to(device).eval()
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self.ends = {end for end in (*ends, self.tokenizer.eos_token_id) if end is not None}

    def sample(self, prompts: Sequence[str], seeds: Sequence[int], done: Done) -> None:
        """See [`Sampler`]."""
        import torch

        rendered = [render(self.tokenizer, prompt, self.settings) for prompt in prompts]
        inputs = self.tokenizer(
            [text for text, _ in rendered],
            return_tensors="pt",
            padding=True,
            add_special_tokens=is_plain(self.tokenizer, self.settings),
        ).to(self.model.device)
        length = inputs["input_ids"].shape[1]
        room = getattr(self.model.config, "max_position_embeddings", None)
        limit = min(self.settings.max_tokens, room - length) if room else self.settings.max_tokens
        if limit < 1:
            raise ValueError(f"A prompt of {length} tokens leaves no room in the model's {room} positions; shorten it.")
        # One random state serves the batch: derive it from the batch alone, never from what ran before.
        digest = hashlib.sha256(repr(([text for text, _ in rendered], list(seeds))).encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big") % 2**63)
        drawn = (
            {"do_sample": True, "temperature": self.settings.temperature, "top_p": self.settings.top_p, "top_k": 0}
            if self.settings.temperature > 0
            else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        )
        with torch.inference_mode():
            output = self.model.generate(
                **inputs,
                max_new_tokens=limit,
                eos_token_id=sorted(self.ends) or None,
                pad_token_id=self.tokenizer.pad_token_id,
                stopping_criteria=[lambda ids, scores, **more: self.stopped],
                **drawn,
            )
        for index, row in enumerate(output[:, length:].tolist()):
            end = next((place for place, token in enumerate(row) if token in self.ends), None)
            tokens = row if end is None else row[: end + 1]
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            done(index, Response(OPEN_THINK * rendered[index][1] + text, len(tokens), end is None))


class VLLMSampler:
    """vLLM in this process; `options` go to `vllm.LLM`, such as `tensor_parallel_size`."""

    independent = True

    def __init__(self, model: str, settings: DecodingSettings, batch_size: int = 512, options=None, revision=None):
        try:
            from vllm import LLM
        except ImportError:
            raise ImportError("`--sampler vllm` needs vLLM: install crop-trl[vllm], or take server or hf.") from None
        self.settings, self.batch_size = settings, batch_size
        pinned = {"revision": revision, "tokenizer_revision": revision} if revision else {}
        self.llm = LLM(model=model, **pinned, **(options or {}))
        self.tokenizer = self.llm.get_tokenizer()

    def sample(self, prompts: Sequence[str], seeds: Sequence[int], done: Done) -> None:
        """See [`Sampler`]."""
        from vllm import SamplingParams

        rendered = [render(self.tokenizer, prompt, self.settings) for prompt in prompts]
        special = is_plain(self.tokenizer, self.settings)
        inputs = [{"prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=special)} for text, _ in rendered]
        params = [
            SamplingParams(
                temperature=self.settings.temperature,
                top_p=self.settings.top_p,
                max_tokens=self.settings.max_tokens,
                seed=seed,
            )
            for seed in seeds
        ]
        for index, output in enumerate(self.llm.generate(inputs, params, use_tqdm=False)):
            best = output.outputs[0]
            text = OPEN_THINK * rendered[index][1] + best.text
            done(index, Response(text, len(best.token_ids), best.finish_reason == "length"))


class ServerSampler:
    """An OpenAI-compatible server at a base address such as `http://host:8000/v1`; the key is in OPENAI_API_KEY."""

    independent = True

    def __init__(self, model: str, settings: DecodingSettings, url: str, batch_size: int = 64, timeout: float = 3600.0):
        try:
            import openai
        except ImportError:
            raise ImportError("`--sampler server` needs the openai package: install crop-trl[openai].") from None
        self.model, self.settings, self.batch_size, self.url = model, settings, batch_size, url
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self._redact = Redactor(key).message  # some servers repeat the key that they refuse
        self._waiting = Waiting()
        self.client = openai.OpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=0)
        try:
            served = [entry.id for entry in self.client.with_options(timeout=30).models.list()]
        except openai.APIConnectionError:
            raise ConnectionError(f"`--server_url` {url!r} does not answer; start it, or mend the address.") from None
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                said = f"`--server_url` {url!r} refuses the key (HTTP {error.status_code}); set OPENAI_API_KEY."
                raise ValueError(said) from None
            served = []  # not every server lists its models
        if served and model not in served:
            raise ValueError(f"`--server_url` {url!r} serves {', '.join(served[:5])}, not `--model` {model!r}.")

    def sample(self, prompts: Sequence[str], seeds: Sequence[int], done: Done) -> None:
        """See [`Sampler`]. A request that fails for good stops further ones; those in flight are waited for and saved,
        then the failure is raised."""
        pairs = list(zip(prompts, seeds, strict=True))
        stop, failures = threading.Event(), []

        def ask(index: int) -> tuple[int, Response] | None:
            try:
                return None if stop.is_set() else (index, self._ask(*pairs[index], stop))
            except Stopped:
                return None
            except Exception as error:
                stop.set()
                failures.append(error)

        # Its threads are daemons: Ctrl-C ends the process at once, and not after requests of up to an hour each.
        with ThreadPool(min(self.batch_size, len(pairs))) as pool:
            try:
                for answered in filter(None, pool.imap_unordered(ask, range(len(pairs)))):
                    done(*answered)
            finally:
                stop.set()
        if failures:
            raise failures[0]

    def _ask(self, prompt: str, seed: int, stop: threading.Event) -> Response:
        repeat = retrying(stop, longest=_LONGEST_PAUSE, attempts=lambda error: _ATTEMPTS, on_wait=self._waiting)
        try:
            return repeat(self._send, prompt, seed)
        except Transient as error:
            kind = ConnectionError if error.cause == "connection" else RuntimeError
            raise kind(f"{error}; what is done is saved, run the same command again.") from None

    def _send(self, prompt: str, seed: int) -> Response:
        import openai

        options = self.settings.chat_template_kwargs
        try:
            answer = self.client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": prompt}],
                temperature=self.settings.temperature,
                top_p=self.settings.top_p,
                max_tokens=self.settings.max_tokens,
                seed=seed,
                extra_body={"chat_template_kwargs": options} if options else None,
            )
        except openai.APIStatusError as error:
            status = error.status_code
            said = f"`--server_url` {self.url!r} answered HTTP {status} ({self._redact(str(error))})"
            if status in (408, 409, 429) or status >= 500:
                raise Transient(said, retry_after=retry_after(error.response.headers)) from None
            raise RuntimeError(f"{said}; what is done is saved, mend this and run the same command again.") from None
        except openai.APIConnectionError:
            raise Transient(f"`--server_url` {self.url!r} stopped answering", "connection") from None
        except (openai.OpenAIError, ValueError) as error:
            raise self._unusable(error) from None
        try:
            return _response(answer)
        except (AttributeError, IndexError, TypeError) as error:
            # Some proxies send their errors with HTTP 200.
            raise self._unusable(getattr(answer, "error", None) or error) from None

    def _unusable(self, reason: Any) -> RuntimeError:
        return RuntimeError(
            f"`--server_url` {self.url!r} answered with something that is no chat completion ({type(reason).__name__}: "
            f"{self._redact(str(reason))}); check the address, and run the same command again: what is done is saved."
        )


def _response(answer: Any) -> Response:
    """Read a chat completion. The client checks no answer, so anything may be in it: raises what reading it raises."""
    choice = answer.choices[0]
    text = choice.message.content
    # Servers with a reasoning parser hand the thinking part over separately.
    reasoning = getattr(choice.message, "reasoning_content", None) or getattr(choice.message, "reasoning", None)
    text = text or ""
    truncated = choice.finish_reason == "length"
    if reasoning:
        closed = bool(text) or not truncated
        text = f"{OPEN_THINK}{reasoning}{'</think>' if closed else ''}{text}"
    tokens = answer.usage.completion_tokens if answer.usage else None
    return Response(text, tokens if isinstance(tokens, int) else None, truncated)
