"""One process that samples for several runs: what each gets is what its own student would have drawn."""

import signal
import subprocess
import sys
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from crop_trl import CROPConfig
from crop_trl.models.graph_sampling import decoding_of
from crop_trl.models.shared_sampling import SharedSampler, Stack

from .test_graph_sampling import PAD, SIZES, greedy, prompts, settings


def student(seed: int, **changes):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(Qwen3Config(**{**SIZES, **changes}), dtype=torch.float32).eval()


def start(prefix):
    return subprocess.Popen([sys.executable, "-m", "crop_trl.models.shared_sampling", str(prefix), "--slots", "3"])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        prefix = tmp_path_factory.mktemp("server") / "s"
        process = start(prefix)
        yield str(prefix)
        process.kill()
        process.wait()


def together(*asks):
    found = [None] * len(asks)

    def run(i, ask):
        found[i] = ask()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(asks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_run_gets_what_its_own_student_writes(server):
    models = [student(seed) for seed in range(3)]
    samplers = [SharedSampler(model, torch.float32, False, server, rows=4) for model in models]
    # More rows than a place has, fewer, and prompts of another width.
    asked = [prompts(9), prompts(3), prompts(4, width=6)]
    for _ in range(2):
        found = together(
            *(lambda s=s, p=p: s.generate(*p, settings(1e-5)) for s, p in zip(samplers, asked, strict=True))
        )
        for model, (ids, mask), own in zip(models, asked, found, strict=True):
            expected = greedy(model, ids, mask)
            assert torch.equal(own[:, : expected.size(1)], expected)
            assert (own[:, expected.size(1) :] == PAD).all()
            with torch.no_grad():  # trained weights are seen in the next round
                for weight in model.parameters():
                    weight.add_(0.05 * torch.randn_like(weight))
    assert not torch.equal(greedy(models[0], *asked[0]), greedy(models[1], *asked[0]))


def test_runs_that_ask_the_same_are_answered_by_one_of_them():
    stack, (ids, mask) = Stack(3), prompts(4)
    model = student(5)
    decoding = decoding_of(settings(1e-5))
    kind = {"config": model.config, "dtype": torch.float32, "half": torch.float32, "autocast": False}
    layout = stack.welcome({**kind, "per_device_train_batch_size": 4, "settings": decoding})
    weights = {name: dict(model.named_parameters(remove_duplicate=False))[name] for name, _, _ in layout}
    ask = {"ids": ids, "mask": mask, "uniform": torch.rand(4, 12), "weights": weights}
    expected = greedy(model, ids, mask)[:, 9:]

    found = stack.draw({2: ask, 0: dict(ask)})
    assert stack.batch is None and stack.one is not None
    changed = {**weights, "lm_head.weight": weights["lm_head.weight"].flip(0)}
    apart = stack.draw({2: ask, 0: {**ask, "weights": changed}})
    assert stack.batch is not None
    for answer in (found[0], found[2], apart[2]):
        assert torch.equal(answer[:, : expected.size(1)], expected)
    assert not torch.equal(apart[0], apart[2])


def test_a_run_that_is_killed_stops_nobody(server, tmp_path):
    model, (ids, mask) = student(1), prompts(4)
    sampler = SharedSampler(model, torch.float32, False, server, rows=4)
    sampler.generate(ids, mask, settings(1e-5))
    code = (
        "import sys; from tests.models.test_shared_sampling import *\n"
        f"s = SharedSampler(student(2), torch.float32, False, {server!r}, rows=4)\n"
        "while True: s.generate(*prompts(4), settings(1e-5)); print('drawn', flush=True)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    asking = threading.Thread(target=lambda: [sampler.generate(ids, mask, settings(1e-5)) for _ in range(8)])
    while other.stdout.readline().strip() != "drawn":
        assert other.poll() is None
    asking.start()
    other.send_signal(signal.SIGKILL)
    asking.join(120)
    assert not asking.is_alive()
    found = sampler.generate(ids, mask, settings(1e-5))
    expected = greedy(model, ids, mask)
    assert torch.equal(found[:, : expected.size(1)], expected)


def test_what_does_not_go_together_is_said(server, tmp_path):
    model, (ids, mask) = student(1), prompts(4)
    SharedSampler(model, torch.float32, False, server, rows=4).generate(ids, mask, settings(1e-5))
    with pytest.raises(ValueError, match="have one `temperature`, not 1e-05 and 0.5"):
        SharedSampler(model, torch.float32, False, server, rows=4).generate(ids, mask, settings(0.5))
    other = student(1, num_hidden_layers=2)
    with pytest.raises(ValueError, match="have one `num_hidden_layers`, not 3 and 2"):
        SharedSampler(other, torch.float32, False, server, rows=4).generate(ids, mask, settings(1e-5))
    # Weights of the same shapes, and another model.
    other = student(1, rms_norm_eps=1e-3)
    with pytest.raises(ValueError, match="have one `rms_norm_eps`"):
        SharedSampler(other, torch.float32, False, server, rows=4).generate(ids, mask, settings(1e-5))
    with pytest.raises(ValueError, match="needs `use_cuda_graphs`"):
        CROPConfig(str(tmp_path), use_cpu=True, shared_sampler="s")


def test_a_seed_says_what_is_drawn_and_shares_are_those_of_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    process = start(tmp_path / "s")
    model = student(0)
    sampler = SharedSampler(model, torch.float32, False, str(tmp_path / "s"), rows=4000)
    ids = torch.randint(10, 300, (1, 6)).expand(4000, 6).contiguous()
    torch.manual_seed(3)
    drawn = sampler.generate(ids, torch.ones_like(ids), settings(0.3, count=2))[:, 6]
    torch.manual_seed(3)
    assert torch.equal(drawn, sampler.generate(ids, torch.ones_like(ids), settings(0.3, count=2))[:, 6])
    expected = (model(ids[:1]).logits[0, -1].detach() / 0.3).softmax(-1)
    shares = torch.bincount(drawn, minlength=300) / 4000
    assert 0.01 < expected.max() < 0.9
    assert ((shares - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all()
    process.kill()
    with pytest.raises(RuntimeError, match="has ended"):
        sampler.generate(ids, torch.ones_like(ids), settings(0.3, count=2))
