"""A run that samples one step off from a vLLM server, as real as two CPU cores allow: only weights go by disk.

As a program, killed in its fourth step unless it resumes; each process writes the ids of the rows that its steps take.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from safetensors.torch import save_file
from transformers import TrainerCallback

from crop_trl import CROPTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))


def hand_over_by_disk(client_class, path: str, put=setattr) -> None:
    """Let clients put weights in a file for a server with `vllm_worker`: between CPUs TRL's own know no way."""

    def update(client, metadata, named_params):
        save_file({name: weights.detach().clone() for name, weights in named_params}, path)
        client._post(f"{client.base_url}/collective_rpc", json={"method": "load_from_disk", "args": [path]})

    put(client_class, "init_communicator", lambda *_, **__: None)
    put(client_class, "update_named_params", update)


class Watched(CROPTrainer):
    """Keeps each batch, whether it was trained on, the ids of its rows, and the weights of that moment."""

    def _generate_and_score_completions(self, inputs):
        training, output = self.model.training, super()._generate_and_score_completions(inputs)
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        kept = (training, [row["id"] for row in inputs], output["rollout"], weights)
        self.__dict__.setdefault("batches", []).append(kept)
        return output


class Die(TrainerCallback):
    """Kills each process of the run, as a machine that fails would."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def make(output: Path, models, server: str, ahead: int, **settings) -> Watched:
    """A trainer with two prompts a step."""
    from tiny import make_rows, make_trainer

    common = {"method": "opd", "max_prompt_length": 100, "max_completion_length": 30, "vllm_mode": "server"}
    common |= {"use_vllm": True, "vllm_server_base_url": server, "rollout_ahead": ahead, "trainer_class": Watched}
    return make_trainer(output, *models, **{"rows": make_rows(16), **common, **settings})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs=2, required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    from launching import accelerator_settings
    from trl.generation.vllm_client import VLLMClient

    hand_over_by_disk(VLLMClient, str(args.output / "weights.safetensors"))
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "per_device_train_batch_size": 4}
    callbacks = [] if args.resume else [Die()]
    more = {**saving, **accelerator_settings(), "callbacks": callbacks}
    trainer = make(args.output / "run", args.models, args.server, 1, **more)
    trainer.train(resume_from_checkpoint=args.resume or None)
    taken = {"ids": [ids for _, ids, *_ in trainer.batches], "history": trainer.state.log_history}
    (args.output / f"taken_{trainer.accelerator.process_index}.json").write_text(json.dumps(taken))


if __name__ == "__main__":
    main()
