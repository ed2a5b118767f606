"""A vLLM server in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import urllib3


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class VllmServer:
    """`vllm serve` of a model in fp32, in a process group of its own."""

    def __init__(self, log, model: str, *options: str):
        self.log, self.model, self.options = log, model, options
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.start()

    def start(self):
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            self.model,
            "--host",
            "127.0.0.1",
        ]
        command += ["--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        command += ["--no-enable-prefix-caching", *self.options]
        environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def wait(self):
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if urllib3.request("GET", self.url + "/models", retries=False, timeout=2).status == 200:
                    return self
            except urllib3.exceptions.HTTPError:
                time.sleep(1)
        pytest.fail(f"vLLM did not start: {open(self.log).read()[-2000:]}")

    def kill(self):
        """-9 to the server and its engine, as a machine that dies would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _cards() -> int:
    """Cards of the machine, whatever this process may see of them."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return 0
    return listed.count("GPU ")


@contextmanager
def on_another_card(log, model: str, *options: str) -> Iterator[str]:
    """
    The address of a server that takes weights over NCCL: it has card 1, and this process sees the first alone
    (`CUDA_VISIBLE_DEVICES=0`). Where NCCL lets processes share a card (see README.md; vLLM loads `VLLM_NCCL_SO_PATH`),
    one is enough.
    """
    pytest.importorskip("vllm")
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if _cards() < (1 if shared else 2) or torch.cuda.device_count() != 1:
        pytest.skip("needs two cards, of which this process sees the first: CUDA_VISIBLE_DEVICES=0")
    port = _free_port()
    command = [sys.executable, "-m", "trl.scripts.vllm_serve", "--model", model, "--port", str(port)]
    command += ["--gpu_memory_utilization", "0.2", *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0" if shared else "1"}
    with open(log, "w") as out:
        engine = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()
