"""One step off: the server samples the next batch with the weights of the step before, and all else is as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts.one_step import Watched, hand_over_by_disk, make
from tiny import make_rows, metric
from transformers import AutoModelForCausalLM, TrainerCallback

from crop_trl.commands.launch import launch_file
from crop_trl.scoring.local import LocalScorer

from .vllm_server import VllmServer, on_another_card

pytestmark = pytest.mark.vllm
SCRIPTS = Path(__file__).parents[1] / "scripts"
RATE = 3e-3


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """Its address; it takes weights from files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{SCRIPTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        options = ("--worker-extension-cls", "vllm_worker.FromDisk", "--max-model-len", "200")
        started = VllmServer(tmp_path_factory.mktemp("server") / "log.txt", models[0], *options)
    try:
        yield started.wait().url.removesuffix("/v1")
    finally:
        started.kill()


@pytest.fixture
def by_disk(monkeypatch, tmp_path):
    """Weights that go to the server by disk."""
    client = pytest.importorskip("trl.generation.vllm_client").VLLMClient
    hand_over_by_disk(client, str(tmp_path / "weights.safetensors"), monkeypatch.setattr)


class Gradients(TrainerCallback):
    """Keeps the gradient of each step."""

    def __init__(self):
        self.kept = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.kept.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))


@pytest.mark.parametrize("method", ["crop", "crop-student", "iw-opd"])
def test_nothing_changes_while_the_student_stays_as_it_is(tmp_path, models, server, by_disk, method):
    runs = []
    for ahead in (0, 1):
        gradients = Gradients()
        # Two epochs of three steps, whose last lies within: no batch of the next epoch is begun in the last of one.
        settings = {"method": method, "learning_rate": 0.0, "max_steps": 5, "generation_kwargs": {"seed": 3}}
        settings |= {"rows": make_rows(6), "num_train_epochs": 2, "callbacks": [gradients]}
        trainer = make(tmp_path / str(ahead), models, server, ahead, **settings)
        trainer.train()
        runs.append((trainer, gradients.kept))
    (plain, before), (ahead, after) = runs
    assert metric(ahead, "off_policy/staleness") == [0, 1, 1, 0, 1] and not metric(plain, "off_policy/staleness")
    for (_, ids, one, _), (_, same, other, _) in zip(plain.batches, ahead.batches, strict=True):
        assert ids == same and one.completion_ids == other.completion_ids
        assert torch.equal(one.selection.mask, other.selection.mask)
    assert len({tuple(ids) for _, _, rollout, _ in ahead.batches for ids in rollout.completion_ids}) > 20
    assert metric(ahead, "loss") == pytest.approx(metric(plain, "loss"), abs=1e-5)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-4 * one.abs().max().item())


def scored(folder: str, weights: dict, rollout) -> torch.Tensor:
    """Log-probabilities of a rollout's tokens by some weights, and where it has any."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    found = LocalScorer(model, 4, 0).score(rollout.prompt_ids, rollout.completion_ids)
    return found.sampled_logprobs[found.mask], found.mask


def check_one_step_off(trainer: Watched, student: str, tolerance: float) -> int:
    """Batches are of the weights of the step before, what is evaluated of those of the moment; so say the logs.
    How many were evaluated."""
    before = None
    steps, evaluated = 0, 0
    for training, _, rollout, weights in trainer.batches:
        if not training:
            now, mask = scored(student, weights, rollout)
            assert (now - rollout.engine_logprobs.cpu()[:, : mask.size(1)][mask]).abs().mean() < tolerance
            assert rollout.old_logprobs is None
            evaluated += 1
            continue
        now, mask = scored(student, weights, rollout)
        old = rollout.old_logprobs.cpu()[:, : mask.size(1)][mask]
        sampled, _ = scored(student, before or weights, rollout)
        assert (sampled - old).abs().mean() < tolerance
        print("gap", (now - old).abs().mean().item(), "of the step before", (sampled - old).abs().mean().item())
        assert before is None or (now - old).abs().mean() > 10 * tolerance
        ratio = (now - old).exp()
        advantages = rollout.selection.teacher_logprobs.cpu()[:, : mask.size(1)][mask] - old
        clipped = (ratio < 0.8) & (advantages < 0) | (ratio > 1.28) & (advantages > 0)
        slack = 20 * tolerance
        assert metric(trainer, "off_policy/ratio")[steps] == pytest.approx(ratio.mean().item(), rel=slack)
        share = clipped.float().mean().item()
        assert metric(trainer, "clip_ratio/region_mean")[steps] == pytest.approx(share, abs=slack)
        gap = metric(trainer, "sampling/sampling_logp_difference/mean")[steps]
        assert gap == pytest.approx((now - old).abs().mean().item(), abs=tolerance)
        before, steps = weights, steps + 1
    assert metric(trainer, "off_policy/staleness") == [0] + [1] * (steps - 1)
    assert steps == 4
    return evaluated


def test_a_batch_comes_from_the_weights_of_the_step_before(tmp_path, models, server, by_disk):
    # What is evaluated are the very prompts that are sampled ahead, with the same number of responses.
    held = {"eval_dataset": make_rows(16).select([2, 3]), "eval_strategy": "steps", "eval_steps": 1}
    held |= {"num_generations_eval": 4}
    trainer = make(tmp_path / "run", models, server, 1, learning_rate=RATE, max_steps=4, **held)
    trainer.train()
    assert check_one_step_off(trainer, models[0], tolerance=1e-4) == 4
    taken = [ids for training, ids, *_ in trainer.batches if training]
    assert taken == [[str(i)] * 4 + [str(i + 1)] * 4 for i in (0, 2, 4, 6)]


@pytest.mark.gpu
def test_so_it_does_on_two_cards(tmp_path, models):
    """Weights go over NCCL; the trainer is on the first card and the engine on the second."""
    options = ("--dtype", "float32", "--max_model_len", "200")
    with on_another_card(tmp_path / "server.log", models[0], *options) as address:
        there = {"vllm_server_timeout": 300, "use_cpu": False}
        trainer = make(tmp_path / "run", models, address, 1, learning_rate=RATE, max_steps=4, **there)
        trainer.train()
        check_one_step_off(trainer, models[0], tolerance=1e-3)


def test_a_killed_run_goes_on_with_the_same_prompts_and_the_weights_of_its_checkpoint(tmp_path, models, server):
    """On two processes, of which the first samples for both."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(launch_file("ddp"))]
    command += ["--mixed_precision", "no", "--num_processes", "2", "--main_process_port", "0"]
    command += [str(SCRIPTS / "one_step.py"), "--models", *models, "--server", server, "--output", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 1200}
    killed = subprocess.run(command, **options)
    assert killed.returncode and "Signal 9 (SIGKILL)" in killed.stderr, killed.stderr[-3000:]
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = subprocess.run([*command, "--resume"], **options)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    shares = [json.loads((tmp_path / f"taken_{rank}.json").read_text()) for rank in range(2)]
    for step in range(3):  # the third to the fifth
        taken = [id for share in shares for id in share["ids"][step]]
        assert taken == [str(2 * (step + 2))] * 4 + [str(2 * (step + 2) + 1)] * 4
    logs = [entry for entry in shares[0]["history"] if "off_policy/staleness" in entry]
    assert [entry["off_policy/staleness"] for entry in logs] == [0, 1, 0, 1, 1]
    gaps = [entry["sampling/sampling_logp_difference/mean"] for entry in logs]
    assert all((gap > 1e-3) == stale for gap, stale in zip(gaps, (False, True, False, True, True))), gaps
