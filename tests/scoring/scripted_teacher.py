"""A stand-in for a vLLM teacher server: a real process and real HTTP, whose answers a test decides.

    python scripted_teacher.py PORT [MODEL [ROOT]]

`POST /script {"mode": ..., "count": n}` makes the next n completions go wrong, `{"reset": true}` undoes all that was
scripted before. Log-probabilities are a fixed function of the ids before a position, so a test knows what has to come
back. `hold` keeps completions waiting until it is taken back.
"""

import json
import math
import os
import random
import sys
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VOCAB = 64
MAX_LOGPROBS = 20
SCRIPT = {
    "mode": "ok",
    "count": 0,
    "poison": None,  # first token of the sequences that can never be scored
    "raw": "",  # sent as it is
    "hold": False,
    "words": None,
    "retry_after": 0.2,
    "choice": {},
    "entry": None,
    "listed": None,
}


def distribution(before: list[int]) -> list[float]:
    """Log-probabilities of all tokens after some ids; two of them are always equal."""
    rng = random.Random(zlib.crc32(repr(before).encode()))
    logprobs = [-rng.randrange(1, 4000) / 400 for _ in range(VOCAB)]
    logprobs[3] = logprobs[4]
    whole = math.log(sum(map(math.exp, logprobs)))
    return [logprob - whole for logprob in logprobs]


def entries(ids: list[int], k: int) -> list:
    """`prompt_logprobs` as vLLM orders them: the sent token first, then the top K by rank."""
    found = [None]
    for t in range(1, len(ids)):
        logprobs = distribution(ids[:t])
        order = sorted(range(VOCAB), key=lambda i: (-logprobs[i], i))
        rank = {token: place + 1 for place, token in enumerate(order)}
        tokens = dict.fromkeys([ids[t], *order[:k]])
        found.append({
            str(token): {"logprob": logprobs[token], "rank": rank[token], "decoded_token": f'"{token}":' + "{"}
            for token in tokens
        })  # fmt: skip
    return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets

    def reply(self, status: int, body, headers=(), missing: int = 0) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[: len(data) - missing])
        if missing:
            self.close_connection = True

    def drip(self, body) -> None:
        """Never silent for long, and never done."""
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        for byte in json.dumps(body).encode() * 100:
            self.wfile.write(bytes([byte]))
            time.sleep(0.05)

    def refuse(self, status: int, message: str, **options) -> None:
        self.reply(status, {"error": {"message": message, "code": status}}, **options)

    def do_GET(self):
        state = self.server.state
        self.reply(
            200, state["listed"] or {"data": [{"id": state["model"], "root": state["root"], "max_model_len": 100}]}
        )

    def do_POST(self):
        state = self.server.state
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/script":
            if request.pop("reset", False):
                state.update(SCRIPT, completions=0)
            state.update(request)
            return self.reply(200, {"completions": state["completions"]})
        if self.path == "/detokenize":
            words = state["words"] or [f"w{i}" for i in range(VOCAB)]
            return self.reply(200, {"prompt": " ".join(words[i] for i in request["tokens"])})
        state["completions"] += 1
        mode = "ok"
        if state["count"]:
            state["count"] -= 1
            mode = state["mode"]
        ids, k = request["prompt"], request["prompt_logprobs"]
        while state["hold"]:
            time.sleep(0.01)
        if mode == "die":
            os._exit(1)
        if ids[0] == state["poison"]:
            return self.refuse(500, "the engine stumbled")
        if k > MAX_LOGPROBS:
            return self.refuse(400, f"Requested prompt logprobs of {k}, which is greater than max allowed: 20")
        if mode == "hang":
            time.sleep(60)
        if mode == "raw":
            key = self.headers.get("Authorization", "")
            self.wfile.write(state["raw"].replace("{key}", key).encode())
            self.close_connection = True
            return None
        if mode in ("500", "503"):
            return self.refuse(int(mode), "the engine stumbled")
        if mode == "429":
            return self.refuse(429, "too many requests", headers=[("Retry-After", str(state["retry_after"]))])
        if mode == "401":
            return self.refuse(401, f"no such key: {self.headers.get('Authorization')}")
        if mode == "vocabulary":
            return self.refuse(400, "Token id 49 is out of vocabulary")
        if mode == "page":
            return self.reply(200, b"<html>Bad gateway</html>")
        if mode == "empty":
            return self.reply(200, {"choices": []})
        sent = ids
        scored = entries(ids, k - 1 if mode == "few" else k)
        if mode == "ids":
            sent = [*ids[:2], 49, *ids[3:]]
        choice = {"prompt_token_ids": sent, "prompt_logprobs": scored, "text": ""}
        if mode == "no ids":
            del choice["prompt_token_ids"]
        if mode == "logits":
            for entry in scored[1:]:
                entry.update({token: {**value, "logprob": value["logprob"] + 9} for token, value in entry.items()})
        choice.update(state["choice"] if mode == "choice" else {})
        if mode == "entry":
            scored[-1] = state["entry"]
        if mode == "drip":
            return self.drip({"choices": [choice]})
        self.reply(200, {"choices": [choice]}, missing=20 if mode == "cut" else 0)

    def log_message(self, *arguments):
        pass


if __name__ == "__main__":
    port, model = int(sys.argv[1]), (sys.argv[2] if len(sys.argv) > 2 else "toy")
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    root = sys.argv[3] if len(sys.argv) > 3 else model
    server.state = {"model": model, "root": root, "completions": 0, **SCRIPT}
    print(server.server_port, flush=True)
    server.serve_forever()
