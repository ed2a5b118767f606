"""Rollouts by a vLLM engine: they come from the weights of the step, never from older ones."""

import pytest
import torch
from tiny import make_trainer, metric
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from crop_trl import CROPTrainer
from crop_trl.scoring.local import LocalScorer
from crop_trl.triplets import load_triplets

from .vllm_server import on_another_card

pytestmark = pytest.mark.vllm


class Disturb(TrainerCallback):
    """Moves every weight after a step, far more than an update would."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        generator = torch.Generator().manual_seed(state.global_step)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor += 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator).to(tensor)


class Watched(CROPTrainer):
    """Keeps each rollout, with the engine's log-probabilities and the weights of that moment."""

    def _generate_single_turn(self, prompt_ids, *arguments, **options):
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *arguments, **options)
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        self.__dict__.setdefault("rollouts", []).append((prompt_ids, completion_ids, logprobs, weights))
        return completion_ids, logprobs


def train(tmp_path, student: str, teacher: str, **settings) -> Watched:
    rows, _ = load_triplets("examples/tiny_math/data/train.jsonl", template="{problem}\nGive the answer in \\boxed{}.")
    trainer = make_trainer(
        tmp_path / "run",
        student,
        teacher,
        rows=rows.select(range(16)),
        tokenizer=AutoTokenizer.from_pretrained(student),
        trainer_class=Watched,
        callbacks=[Disturb()],
        max_steps=2,
        max_prompt_length=100,
        max_completion_length=40,
        # The gap is logged on trained tokens: with all of them, nothing hides.
        method="opd",
        use_vllm=True,
        use_cpu=not torch.cuda.is_available(),
        **settings,
    )
    trainer.train()
    return trainer


def check_freshness(trainer: Watched, student: str, tolerance: float = 0.02) -> None:
    """Each rollout has the log-probabilities of its own weights, and visibly not those of the step before."""
    # The engine computes in 16 bits, whatever the weights are stored in.
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32).eval()

    def gap(rollout, weights) -> float:
        prompt_ids, completion_ids, logprobs, _ = rollout
        model.load_state_dict(weights)
        scored = LocalScorer(model, 4, 0).score(prompt_ids, completion_ids)
        differences = [
            (scored.sampled_logprobs[row, : len(ids)] - torch.tensor(logprobs[row]).reshape(-1)).abs()
            for row, ids in enumerate(completion_ids)
        ]
        return torch.cat(differences).mean().item()

    first, second = trainer.rollouts
    print("gaps:", gap(first, first[3]), gap(second, second[3]), "stale:", gap(second, first[3]))
    assert gap(first, first[3]) < tolerance and gap(second, second[3]) < tolerance
    assert gap(second, first[3]) > 1.0
    logged = metric(trainer, "sampling/sampling_logp_difference/mean")
    assert logged == pytest.approx([gap(first, first[3]), gap(second, second[3])], abs=tolerance)


NGRAMS = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.mark.parametrize("speculation", [None, pytest.param(NGRAMS, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sleep", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_changed_weight_changes_the_next_rollout(tmp_path, fp32_models, loadable_weights, sleep, speculation):
    # Sleep mode frees the engine's memory between rollouts; it needs CUDA, and so does checking what is speculated.
    settings = {"vllm_gpu_memory_utilization": 0.2, "vllm_enable_sleep_mode": sleep}
    trainer = train(tmp_path, *fp32_models, vllm_mode="colocate", vllm_speculative_config=speculation, **settings)
    check_freshness(trainer, fp32_models[0])
    config = trainer.vllm_generation.llm.llm_engine.vllm_config.speculative_config
    assert (config and config.num_speculative_tokens) == (speculation and 3)


@pytest.mark.gpu
def test_a_changed_weight_changes_the_next_rollout_of_a_server(tmp_path, fp32_models):
    student, teacher = fp32_models
    patience = {"vllm_server_timeout": 300}
    with on_another_card(tmp_path / "server.log", student, "--max_model_len", "160") as address:
        trainer = train(tmp_path, student, teacher, vllm_mode="server", vllm_server_base_url=address, **patience)
        check_freshness(trainer, student)
