"""A small OpenAI-compatible server, real HTTP, whose answers a test decides."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ChatServer:
    """
    Serves `/v1/models` and `/v1/chat/completions`.

    `answer(request)` returns the message's text, or a dict that is merged into the choice (`message`, `finish_reason`),
    or an int, which becomes the HTTP status, or bytes, which become the whole body. All requests are kept in
    `requests`.
    """

    def __init__(self, answer: Callable[[dict], object], model: str = "toy"):
        self.requests: list[dict] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def reply(self, status: int, body: dict | bytes) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.reply(200, {"object": "list", "data": [{"id": model, "object": "model"}]})

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(request)
                answer_ = answer(request)
                if isinstance(answer_, int):
                    return self.reply(answer_, {"error": {"message": "no", "type": "x"}})
                if isinstance(answer_, bytes):
                    return self.reply(200, answer_)
                choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer_}}
                if isinstance(answer_, dict):
                    choice = {**choice, **answer_}
                usage = {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
                self.reply(200, {"id": "c", "object": "chat.completion", "created": 0, "model": model,
                                 "choices": [choice], "usage": usage})  # fmt: skip

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
