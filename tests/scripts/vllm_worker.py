"""Lets a vLLM server on CPUs take over weights from a file (`--worker-extension-cls vllm_worker.FromDisk`)."""

import torch
from safetensors.torch import load_file
from vllm.model_executor.layers import utils


def _as_they_are(layer, *arguments, **options) -> None:
    layer.cpu_linear = torch.nn.functional.linear


# vLLM packs weights for a CPU and forgets how to load new ones.
utils.dispatch_cpu_unquantized_gemm = _as_they_are


class FromDisk:
    """Mixed into vLLM's worker."""

    def load_from_disk(self, path: str) -> None:
        """Take over the weights in a file."""
        self.model_runner.model.load_weights(load_file(path).items())
