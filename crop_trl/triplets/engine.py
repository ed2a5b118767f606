"""A model in this process in place of an endpoint: vLLM, which batches what is in flight, or Hugging Face generate.

It is loaded with the first request: a rerun that finds all answers in the ledger needs none.
"""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Mapping
from itertools import count
from multiprocessing import resource_tracker
from typing import Any

from ..evaluation.sampling import Response, TransformersSampler, is_plain, render
from .client import Answer, EndpointError, RequestRefused
from .settings import TripletSettings

GATHERING = 0.1  # seconds in which requests for a batch come together


class LocalClient:
    """What [`~crop_trl.triplets.client.Client`] is to an endpoint; its `_load` sets `tokenizer` and `room`."""

    accepted = True  # a request that is turned down is a case of its own
    mode = "text"

    def __init__(self, settings: TripletSettings):
        self.settings, self.retries, self.stopping = settings, Counter(), asyncio.Event()
        self.decoding = settings.decoding()
        self._loading: asyncio.Task | None = None

    async def __aenter__(self) -> "LocalClient":
        return self

    async def __aexit__(self, *exception: Any) -> None:
        pass

    async def complete(self, messages: list[dict[str, str]], name: str, schema: Mapping[str, Any]) -> Answer:
        """Have a request answered."""
        own = self.settings
        try:
            self._loading = self._loading or asyncio.create_task(asyncio.to_thread(self._load))
            await self._loading
            text, _ = render(self.tokenizer, messages, self.decoding)
            ids = self.tokenizer.encode(text, add_special_tokens=is_plain(self.tokenizer, self.decoding))
            if self.room and len(ids) >= self.room:
                raise RequestRefused("too_long", f"a prompt of {len(ids)} tokens, and the model reads {self.room}")
            response = await self._answer(messages, ids, schema)
        except (RequestRefused, EndpointError):
            raise
        except Exception as error:  # whatever an engine dies of
            said = " ".join(str(error).split())[:300]
            raise EndpointError(
                f"`engine` {own.engine!r} failed with `model` {own.model!r} ({type(error).__name__}: {said}); correct "
                "the settings or try a smaller `concurrency`, and run again: what was answered is kept."
            ) from error
        usage = {"prompt_tokens": len(ids), "completion_tokens": response.tokens}
        reason = "length" if response.truncated else "stop"
        return Answer(response.text, None, reason, usage, own.model, None, self.mode)


class VLLMClient(LocalClient):
    """vLLM's asynchronous engine, which holds answers to their schema."""

    def __init__(self, settings: TripletSettings):
        super().__init__(settings)
        self.mode = "text" if settings.response_format == "text" else "json_schema"
        self._engine, self._numbers = None, count()

    async def __aexit__(self, *exception: Any) -> None:
        if self._engine:
            self._engine.shutdown()
            self._engine = None  # or it complains when Python ends

    def _load(self) -> None:
        try:
            from vllm import AsyncEngineArgs, AsyncLLMEngine
        except ImportError:
            raise EndpointError(
                "`engine` 'vllm' needs vLLM; run `pip install 'crop-trl[vllm]'`, or choose `engine` transformers."
            ) from None
        from transformers import AutoTokenizer

        # The engine's processes inherit this: Ctrl-C is for this one, which lets them answer what is in flight.
        resource_tracker.ensure_running()  # which, later, would take the mask away
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        model = self.settings.model
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=model, **self.settings.engine_fields()))
        self.room = self._engine.model_config.max_model_len

    async def _answer(self, messages: list[dict[str, str]], ids: list[int], schema: Mapping[str, Any]) -> Response:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        params = SamplingParams(
            temperature=self.decoding.temperature,
            top_p=self.decoding.top_p,
            max_tokens=min(self.decoding.max_tokens, self.room - len(ids)),
            structured_outputs=StructuredOutputsParams(json=schema) if self.mode == "json_schema" else None,
        )
        async for output in self._engine.generate({"prompt_token_ids": ids}, params, str(next(self._numbers))):
            best = output.outputs[0]
        return Response(best.text, len(best.token_ids), best.finish_reason == "length")


class TransformersClient(LocalClient):
    """The sampler of the evaluation; requests that wait together are a batch."""

    _sampler: TransformersSampler | None = None

    async def __aexit__(self, *exception: Any) -> None:
        if self._sampler:
            self._sampler.stopped = True

    def _load(self) -> None:
        self._sampler = TransformersSampler(self.settings.model, self.decoding, **self.settings.engine_fields())
        self.tokenizer = self._sampler.tokenizer
        self.room = getattr(self._sampler.model.config, "max_position_embeddings", None)
        self._waiting: list[list[dict[str, str]]] = []
        self._drawing = asyncio.Lock()

    async def _answer(self, messages: list[dict[str, str]], ids: list[int], schema: Mapping[str, Any]) -> Response:
        if not self._waiting:
            self._batch = asyncio.create_task(self._draw())
        place, batch = len(self._waiting), self._batch
        self._waiting.append(messages)
        return (await batch)[place]

    async def _draw(self) -> dict[int, Response]:
        async with self._drawing:  # what comes while a batch is drawn waits for the next
            await asyncio.sleep(GATHERING)
            batch, self._waiting = self._waiting, []
            found, seeds = {}, [random.getrandbits(31) for _ in batch]
            await asyncio.to_thread(self._sampler.sample, batch, seeds, found.__setitem__)
        return found


CLIENTS = {"vllm": VLLMClient, "transformers": TransformersClient}
