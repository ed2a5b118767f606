"""A stand-in for a language model, so that `make_triplets.ipynb` runs without a key, a network or a GPU.

An HTTP server in a thread of the notebook's process, with the one route of OpenAI's interface that the triplet pipeline
uses. It can do the embedded problems only: it "writes" their stored paraphrases and counterfactuals, gets every third
problem wrong at the first attempt and every ninth always, and judges with two rules of thumb where a model would read.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def start(records: str | Path) -> ThreadingHTTPServer:
    """
    Answer requests until the process ends, or `shutdown()` is called.

    Args:
        records (`str` or `Path`): JSONL of finished triplets, which the answers are taken from.

    Returns:
        `http.server.ThreadingHTTPServer`: Its address is `server.url`, to be used as `base_url`.
    """
    rows = [json.loads(line) for line in Path(records).read_text(encoding="utf-8").splitlines()]
    known = {row["original_problem"]: (place, row) for place, row in enumerate(rows)}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            user = body["messages"][-1]["content"]
            problem = _between("problem", user)
            if self.path != "/v1/chat/completions" or problem not in known:
                message = "This stand-in knows the problems of examples/tiny_math only; give a real endpoint."
                return self.reply(400, {"error": {"message": message}})
            place, row = known[problem]
            candidates = _between("candidates", user)
            careless = place % 9 == 7 or (place % 3 == 1 and "<feedback>" not in user)
            answer = judge(problem, json.loads(candidates)) if candidates else write(row, careless)
            text = json.dumps(answer)
            # About four characters a token.
            counts = [len(part) // 4 for part in ("".join(m["content"] for m in body["messages"]), text)]
            self.reply(
                200,
                {
                    "id": f"stand-in-{place}",
                    "object": "chat.completion",
                    "created": 0,
                    "model": body["model"],
                    "choices": [
                        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
                    ],
                    "usage": {
                        "prompt_tokens": counts[0],
                        "completion_tokens": counts[1],
                        "total_tokens": sum(counts),
                    },
                },
            )

        def reply(self, status: int, body: dict) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            """Nothing: a line for each request would fill the notebook."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def write(row: dict, careless: bool) -> dict:
    """The generator's answer; a careless one changes a number of the paraphrase too."""
    candidates = []
    for change in [row, *row["alternates"]]:
        paraphrase = row["paraphrase_problem"]
        if careless:
            paraphrase = re.sub(r"\d+", lambda number: str(int(number[0]) + 1), paraphrase, count=1)
        condition = change["counterfactual_condition_description"].split(":")[0]
        candidates.append(
            {
                "condition_type": change["condition_type"],
                "original_condition_description": condition,
                "paraphrased_condition_description": condition,
                "counterfactual_condition_description": change["counterfactual_condition_description"],
                "paraphrase_problem": paraphrase,
                "counterfactual_problem": change["counterfactual_problem"],
                "counterfactual_description": change["counterfactual_description"],
            }
        )
    return {"decision": "candidates", "candidates": candidates}


def judge(problem: str, candidates: list[dict]) -> dict:
    """The critic's answer: a paraphrase repeats all numbers, and a counterfactual differs in one word."""
    evaluations = []
    for candidate in candidates:
        same = sorted(_numbers(candidate["paraphrase_problem"])) == sorted(_numbers(problem))
        changed = candidate["counterfactual_problem"].split()
        words = problem.split()
        differing = sum(a != b for a, b in zip(words, changed)) + abs(len(words) - len(changed))
        violations = [] if same else [{"criterion": "other_numbers", "evidence": candidate["paraphrase_problem"]}]
        evaluations.append(
            {
                "candidate_number": candidate["candidate_number"],
                "decision": "accept" if same else "reject",
                "violations": violations,
                "paraphrase_status": "accept" if same else "reject",
                "paraphrase_confidence": 0.95 if same else 0.1,
                "paraphrase_reason": "All numbers are repeated." if same else "A number is not that of the source.",
                "counterfactual_status": "accept",
                "counterfactual_confidence": 0.95 if differing == 1 else 0.8,
                "counterfactual_reason": f"{differing} word differs."
                if differing == 1
                else f"{differing} words differ.",
                "original_answer_type": "single_integer",
                "counterfactual_answer_type": "single_integer",
                "original_determinacy": "determinate",
                "counterfactual_determinacy": "determinate",
                "determinacy_evidence": "Each step has one result.",
                "confidence": 0.95 if same and differing == 1 else 0.8 if same else 0.1,
            }
        )
    accepted = [e["candidate_number"] for e in evaluations if e["decision"] == "accept"]
    return {"evaluations": evaluations, "selected_candidate_number": accepted[0] if accepted else None}


def _between(tag: str, text: str) -> str | None:
    """What stands between a tag and its end, or `None`."""
    found = re.search(rf"<{tag}>\n(.*?)\n</{tag}>", text, re.DOTALL)
    return found and found[1]


def _numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text)
