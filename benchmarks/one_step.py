"""A step of `rollout_ahead`, the engine on a second card, against the longer of rollout and scoring with update.

    CUDA_VISIBLE_DEVICES=0 python benchmarks/one_step.py --server-gpu 1

Student and teacher are on the first card, the engine behind `vllm serve` on the second. One trainer takes steps without
looking ahead, which give the parts, and then as many one step off.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

from baseline import record
from shapes import draw_lengths, make_model, make_tokenizer, save_model
from step import PARTS, add_step_arguments, make_trainer
from trainers import StepClock, forget
from trl.generation.vllm_client import VLLMClient

TURNS = ("plain", "ahead")


class InTwoHalves(StepClock):
    """Steps that ask the engine at once, and then those that ask it a step before."""

    def attach(self, trainer) -> None:
        """Clock a trainer's steps."""
        self.ahead = trainer._one_step
        super().attach(trainer)

    def take(self, args, method: str) -> None:
        """Switch it on or off for the next step."""
        self.trainer._one_step = self.ahead if method == "ahead" else nullcontext


def give_lengths(lengths: list[int]) -> None:
    """Make a server write responses of exactly these lengths, each of which is a request of its own."""
    generate = VLLMClient.generate

    def forced(client, prompts, n=1, generation_kwargs=None, **sampling):
        def ask(place: int) -> dict[str, list]:
            length = lengths[place % len(lengths)]
            own = {**(generation_kwargs or {}), "min_tokens": length, "max_tokens": length, "ignore_eos": True}
            return generate(client, prompts=[prompts[place // n]], generation_kwargs=own, **sampling)

        with ThreadPoolExecutor(len(lengths)) as threads:
            answers = list(threads.map(ask, range(len(prompts) * n)))
        whole = {name: [row for answer in answers for row in answer[name]] for name in answers[0]}
        return {**whole, "prompt_ids": whole["prompt_ids"][::n]}

    VLLMClient.generate = forced


def serve(args, folder: str) -> tuple[subprocess.Popen, int]:
    """An engine with a random student on its own card, and its port; nothing of it is left here."""
    save_model(make_model(args.student, args.device), make_tokenizer(), folder)
    forget()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "trl.scripts.vllm_serve", "--model", folder, "--port", str(port)]
    command += ["--gpu_memory_utilization", "0.8", "--max_model_len", str(1024 + args.longest)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": args.server_gpu}
    return subprocess.Popen(command, env=environment, start_new_session=True), port


def main() -> None:
    """Parse, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_step_arguments(parser)
    parser.add_argument("--server-gpu", default="1")
    args = parser.parse_args()
    give_lengths(draw_lengths(args.responses, args.mean, args.longest))
    turns = [turn for turn in TURNS for _ in range(args.warmup + args.repeats)]
    with tempfile.TemporaryDirectory() as folder:
        server, port = serve(args, folder)
        try:
            address = {"vllm_server_host": "127.0.0.1", "vllm_server_port": port, "vllm_server_timeout": 600.0}
            trainer = make_trainer(args, ["crop"] * len(TURNS), vllm_mode="server", rollout_ahead=1, **address)
            clock = InTwoHalves(args.device, turns)
            clock.attach(trainer)
            trainer.train()
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    parts = {t: {part: round(clock.median(part, t, args.warmup), 3) for part in PARTS} for t in TURNS}
    rollout, scoring, update = (parts["plain"][part] for part in ("seconds/rollout", "seconds/scoring", "update"))
    last = [entry for entry in trainer.state.log_history if "off_policy/ratio" in entry][-1]
    details = {"student": args.student, "teacher": args.teacher, "responses": args.responses, "parts": parts}
    details |= {"compiled": args.compile, "clipped": last["clip_ratio/region_mean"]}
    details |= {"staleness": last["off_policy/staleness"], "mean_ratio": last["off_policy/ratio"]}
    longer = max(rollout, scoring + update)
    record("one_step_off", parts["ahead"]["step"], longer, args.device, args.output, **details)


if __name__ == "__main__":
    main()
