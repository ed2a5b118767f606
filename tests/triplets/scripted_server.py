"""An OpenAI-compatible chat server that says what `scripted_answers.py` has for each problem. A process of its own:

    python scripted_server.py --log FILE [--no-json-schema] [--no-json-mode] [--no-usage] [--key KEY] [--latency S]
        [--plan NAME] [--hold N] [--json-schema-500] [--retry-after S]

It prints its address. The log has one line per answer (a chat completion that was sent), with the answer's id. With
`--hold N` requests wait until so many are in flight, or for a GET of `/release`; `/stats` says what came so far.

With `--host` alone it reads options from standard input, a JSON list a line, and starts a process for each, whose
address and id it prints.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import re
import signal
import sys
from collections import Counter

from aiohttp import web
from scripted_answers import PLANS, RAW_REPLIES, critic, generator, plan_of


class Server:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.numbers = itertools.count()
        self.seen: Counter = Counter()
        self.run = hashlib.sha256(str(id(self)).encode()).hexdigest()[:6]
        self.log = open(options.log, "a", buffering=1) if options.log else None
        self.in_flight = self.most_in_flight = self.arrived = 0
        self.released = asyncio.Event()
        self.formats: list[str] = []

    async def stats(self, request: web.Request) -> web.Response:
        return web.json_response({
            "most_in_flight": self.most_in_flight, "in_flight": self.in_flight, "arrived": self.arrived,
            "formats": self.formats,
        })  # fmt: skip

    async def release(self, request: web.Request) -> web.Response:
        self.released.set()
        return web.Response()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.arrived += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            body = await request.json()
            if self.in_flight >= self.options.hold:
                self.released.set()
            await self.released.wait()
            return await self.answer(request, body)
        finally:
            self.in_flight -= 1

    async def answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        if self.options.key and request.headers.get("authorization") != f"Bearer {self.options.key}":
            return error(401, f"Incorrect API key provided: {request.headers.get('authorization')}", "invalid_api_key")
        if self.options.model and body["model"] != self.options.model:
            return error(404, f"The model {body['model']} does not exist", "model_not_found")
        kind = body.get("response_format", {}).get("type", "text")
        self.formats.append(kind)
        if kind == "json_schema" and self.options.json_schema_500:
            return error(500, "Internal Server Error", None)
        if (kind == "json_schema" and self.options.no_json_schema) or (
            kind == "json_object" and self.options.no_json_mode
        ):
            return error(400, f"response_format {kind} is not supported", "invalid_request_error")
        if self.options.latency:
            await asyncio.sleep(self.options.latency)
        system, user = (body["messages"][place]["content"] for place in (0, -1))
        # The forms of the shipped templates, and of the paper's.
        problem = re.search(r"(?:<problem>|<<<)\n(.*?)\n(?:</problem>|>>>)", user, re.DOTALL)[1]
        sent = re.search(r"^\[\n\{.*?^\]$", user, re.DOTALL | re.MULTILINE)
        plan = self.options.plan or plan_of(problem)
        _, _, generates, judges, transport = PLANS[plan]
        is_critic = sent is not None
        request_hash = hashlib.sha256(json.dumps([body["model"], system, user]).encode()).hexdigest()
        self.seen[request_hash] += 1
        first = self.seen[request_hash] == 1
        fault = await self.transport(transport, first, is_critic, request)
        if fault is not None:
            return fault
        if is_critic:
            candidates = json.loads(sent[0])
            answer_type = re.search(r"answer types: (\w+)", user, re.IGNORECASE)[1]
            # The generator's second round starts from candidates alike, so the round is told by the plan's memory.
            self.seen[f"critic {problem}"] += first
            round_number = min(2, self.seen[f"critic {problem}"]) if "repaired" in plan else 1
            kind = judges if isinstance(judges, str) else judges[round_number - 1]
            content, reason, refusal = critic(kind, candidates, answer_type)
        else:
            round_number = 2 if "<feedback>" in user else 1
            kind = generates if isinstance(generates, str) else generates[round_number - 1]
            content, reason, refusal = generator(kind, problem)
            if round_number == 2 and content:  # another text, so that the critic's second request is another one
                content = content.replace("In other words:", "Put differently:")
        usage = {
            "prompt_tokens": len(system + user) // 4,
            "completion_tokens": len(content or "") // 4,
            "total_tokens": len(system + user + (content or "")) // 4,
            "prompt_tokens_details": {"cached_tokens": len(system) // 4},
        }
        identifier = f"chatcmpl-{self.run}-{next(self.numbers)}"
        if transport in ("error", "abort") and first:
            content, reason = (content[:50], "error") if transport == "error" else (None, "abort")
        elif self.log:
            self.log.write(json.dumps({"id": identifier, "request": request_hash, "plan": plan}) + "\n")
        return web.json_response(
            {
                "id": identifier,
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": reason,
                        "message": {"role": "assistant", "content": content, "refusal": refusal},
                    }
                ],
                **({} if self.options.no_usage else {"usage": usage}),
            },
            content_type="text/plain" if transport == "plain" else "application/json",
        )

    async def transport(
        self, fault: str | None, first: bool, is_critic: bool, request: web.Request
    ) -> web.StreamResponse | None:
        if fault == "400" or (fault == "400_critic" and is_critic):
            return error(400, "Your prompt was flagged.", "content_policy_violation")
        if fault == "403":
            return error(403, "Your input was flagged by moderation.", "moderation")
        if fault == "always_500":
            return error(500, "Internal Server Error", None)
        if fault == "drop":
            request.transport.close()
            return web.Response()
        if fault is None or not first:
            return None
        if fault in RAW_REPLIES:
            key = request.headers.get("authorization", "").encode()
            request.transport.write(RAW_REPLIES[fault].replace(b"{key}", key))
            request.transport.close()
            return web.Response()
        if fault == "429":
            return error(429, "Rate limit reached", "rate_limit_exceeded", {"Retry-After": self.options.retry_after})
        if fault in ("500", "503"):
            return error(int(fault), f"try later; you sent {request.headers.get('authorization')}", None)
        if fault == "html":
            return web.Response(text="<html>gateway</html>", content_type="text/html")
        if fault == "no_choices":
            return web.json_response({"id": "x", "choices": []})
        if fault == "drip":
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            while request.transport and not request.transport.is_closing():
                await response.write(b" ")  # never silent for long, and never done
                await asyncio.sleep(0.05)
            return response
        if fault == "hang":
            await asyncio.sleep(30)
            return error(504, "too late", None)  # nobody listens any more, so it must not be logged as an answer
        if fault == "cut":
            response = web.StreamResponse(headers={"Content-Length": "10000", "Content-Type": "application/json"})
            await response.prepare(request)
            await response.write(b'{"id": "half')
            request.transport.close()
            return response
        return None


def error(status: int, message: str, code: str | None, headers: dict | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "code": code}}, status=status, headers=headers)


async def main(words: list[str], about: str = "") -> None:
    """Serve; `about` stands behind the address that is printed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log")
    parser.add_argument("--key")
    parser.add_argument("--model")
    parser.add_argument("--plan")
    parser.add_argument("--hold", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--no-usage", action="store_true")
    parser.add_argument("--no-json-schema", action="store_true")
    parser.add_argument("--json-schema-500", action="store_true")
    parser.add_argument("--retry-after", default="0.3")
    parser.add_argument("--no-json-mode", action="store_true")
    options = parser.parse_args(words)
    server = Server(options)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_get("/stats", server.stats)
    app.router.add_get("/release", server.release)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", options.port)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1{about}", flush=True)
    await asyncio.Event().wait()


def host() -> None:
    """A fork takes a thirtieth of what the start of a program takes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            asyncio.run(main(json.loads(line), f" {os.getpid()}"))


if __name__ == "__main__":
    host() if sys.argv[1:] == ["--host"] else asyncio.run(main(sys.argv[1:]))
