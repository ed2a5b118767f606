"""Teachers read what is finished while a real engine still writes: the same signals, masks and students."""

import signal
import subprocess
import sys
import time

import pytest
import torch
from tiny import make_rows, make_tokenizer, make_trainer, metric
from trainers import given_lengths

from crop_trl import CROPTrainer
from crop_trl.methods import SelectionSettings, select
from crop_trl.training.ahead import one_by_one

from .vllm_server import VllmServer

pytestmark = pytest.mark.vllm


@pytest.fixture
def served(models):
    """The address of `crop-trl serve-teacher` with the teacher."""
    command = [sys.executable, "-m", "crop_trl.commands", "serve-teacher", models[1], "--dtype", "float32"]
    server = subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True)
    yield next(line.split()[-1] for line in server.stderr if "http://" in line)
    server.send_signal(signal.SIGTERM)
    server.wait()


class Compared(CROPTrainer):
    """Scores each rollout a second time, at once."""

    def score_rollout(self, *rollout):
        signals = super().score_rollout(*rollout)
        ahead, self.ahead = self.ahead, None
        plain = super().score_rollout(*rollout)
        self.ahead = ahead
        self.__dict__.setdefault("both", []).append((signals, plain))
        return signals


def wait_for_the_first(trainer, engine) -> list[int]:
    """Let the engine go on after the first response of each rollout when it is scored. How many were left then."""
    scorers, step, left = trainer.ahead.scorers.values(), engine.step, []

    def waiting():
        unfinished = engine.get_num_unfinished_requests()
        outputs = step()
        if any(output.finished for output in outputs) and unfinished == 8 and engine.has_unfinished_requests():
            deadline = time.monotonic() + 300
            while not any(scorer._scored for scorer in scorers):
                assert time.monotonic() < deadline, [scorer._error for scorer in scorers]
                time.sleep(0.01)
            left.append(engine.get_num_unfinished_requests())
        return outputs

    engine.step = waiting
    return left


def make(tmp_path, student, teacher, method, **settings) -> Compared:
    rows = make_rows(16)
    if "teachers" in settings:
        rows = rows.add_column("teacher", [list(settings["teachers"])[i % 2] for i in range(16)])
    limits = {"max_prompt_length": 100, "max_completion_length": 90, "max_steps": 2}
    common = dict(rows=rows, trainer_class=Compared, method=method, use_vllm=True, score_ahead=True, **limits)
    return make_trainer(tmp_path, student, teacher, **common, **settings)


def check_same(trainer, method: str) -> None:
    assert len(trainer.both) == 2
    for signals, plain in trainer.both:
        for name in plain:
            for a, b in zip(signals.variants(name), plain.variants(name), strict=True):
                torch.testing.assert_close(a.sampled_logprobs, b.sampled_logprobs, rtol=0, atol=1e-5)
                assert torch.equal(a.mask, b.mask)
        valid = plain["teacher/original"].mask
        ours, theirs = (select(method, which, valid, SelectionSettings()).mask for which in (signals, plain))
        assert torch.equal(ours, theirs) and 0 < ours.sum() <= valid.sum()
    # What was scored ahead was found: nothing was scored a third time.
    counts = [entry for entry in trainer.state.log_history[0] if entry.endswith("sequences")]
    scored = sum(sum(metric(trainer, name)) for name in counts)
    assert scored == 2 * 2 * 8 * {"crop": 3, "opd": 1, "credit": 2}[method]


@pytest.mark.parametrize("method", ["crop", "opd", "credit"])
def test_served_teachers_beside_an_engine_in_this_process(tmp_path, models, served, loadable_weights, method):
    settings = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2}
    if method == "credit":  # unrelated prompts too, and a teacher for every other row
        teacher, settings["teachers"] = None, {name: {"server_urls": served} for name in ("first", "second")}
    else:
        teacher, settings["teacher_server_urls"] = models[1], served
    trainer = make(tmp_path / "run", models[0], teacher, method, **settings)
    given_lengths(trainer.vllm_generation.llm, [10, 20, 20, 30, 40, 60, 80, 90])
    left = wait_for_the_first(trainer, trainer.vllm_generation.llm.llm_engine)
    trainer.train()
    assert left == [7, 7]
    check_same(trainer, method)


def test_an_engine_on_a_server(tmp_path, models, monkeypatch):
    """On a CPU weights cannot be sent to it, so the student stays as it is."""
    client = pytest.importorskip("trl.generation.vllm_client").VLLMClient
    options = ("--logprobs-mode", "processed_logprobs", "--max-model-len", "200")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    server = VllmServer(tmp_path / "log.txt", models[0], *options).wait()
    try:
        for name in ("init_communicator", "update_named_params", "close_communicator"):
            monkeypatch.setattr(client, name, lambda *_, **__: None, raising=False)
        address = server.url.removesuffix("/v1")
        settings = {"vllm_mode": "server", "vllm_server_base_url": address, "learning_rate": 0.0}
        trainer = make(tmp_path / "run", *models, "crop", **settings)
        told, finished = [], trainer.ahead.scorers["teacher"].finished
        monkeypatch.setattr(
            trainer.ahead.scorers["teacher"], "finished", lambda *one: (told.append(one), finished(*one))
        )
        trainer.train()
        assert len(told) == 16
        check_same(trainer, "crop")

        prompts = make_tokenizer()(["what is 3 plus 4", "the sum of"])["input_ids"]
        plain, told = client(address), []
        asked = {"prompts": prompts, "n": 3, "max_tokens": 20, "generation_kwargs": {"seed": 7}}
        together = plain.generate(**asked)
        each = one_by_one(plain, lambda *one: told.append(one))(**asked)
        assert len(told) == 6 and len({tuple(ids) for ids in each["completion_ids"]}) > 3
        for name in ("prompt_ids", "completion_ids", "logprob_token_ids"):
            assert each[name] == together[name], name
    finally:
        server.kill()
