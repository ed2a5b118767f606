"""A vLLM server in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import urllib3


class VllmServer:
    """`vllm serve` of a model in fp32, in a process group of its own."""

    def __init__(self, log, model: str, *options: str):
        self.log, self.model, self.options = log, model, options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
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
