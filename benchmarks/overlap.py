"""A step whose teacher reads what is finished while the engine still writes, against rollout and update alone.

    CUDA_VISIBLE_DEVICES=0 python benchmarks/overlap.py --server-gpu 1

Student and engine on the first card, the teacher behind `crop-trl serve-teacher` on the second. One trainer takes steps
with and without `score_ahead` in turns; the parts are those of the steps without. At the end one rollout is scored both
ways: how many tokens both keep, and how many of those with a score of 0.01 nats or more.
"""

import argparse
import tempfile

import torch
from baseline import record
from served import start_server
from shapes import draw_rows, make_model, make_tokenizer, save_model
from step import PARTS, add_step_arguments, make_trainer
from trainers import StepClock, forget

from crop_trl import CROPTrainer, select

TURNS = ("plain", "ahead")


class Turns(StepClock):
    """Steps without and with scoring ahead."""

    def attach(self, trainer) -> None:
        """Clock a trainer's steps."""
        self.ahead = trainer.ahead
        super().attach(trainer)

    def take(self, args, method: str) -> None:
        """Switch it on or off for the next step."""
        self.trainer.ahead = self.ahead if method == "ahead" else None


def serve(args) -> tuple:
    """A server with a random teacher, its address, and nothing left of the teacher here."""
    cuda = args.device.startswith("cuda")
    model = make_model(args.teacher, args.device, torch.bfloat16 if cuda else torch.float32, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, make_tokenizer(), folder)
        del model
        forget()
        options = ["--gpus", args.server_gpu] if cuda else ["--dtype", "float32"]
        return start_server(folder, options + ["--compile_layers"] * args.compile)


def kept_both_ways(trainer: CROPTrainer, ahead, prompts: int) -> dict[str, int]:
    """Tokens of one rollout that are kept, and those of them that are kept when it is scored at once."""
    trainer.ahead = ahead
    rollout = trainer.sample(draw_rows(prompts, seed=3))
    trainer.ahead = None
    needs = list(rollout.signals)
    at_once = trainer.score_rollout(rollout.rows, rollout.prompt_ids, rollout.completion_ids, needs)
    ours, theirs = (
        select("crop", signals, rollout.loss_mask, trainer.args.selection_settings)
        for signals in (rollout.signals, at_once)
    )
    both, large = ours.mask & theirs.mask, ours.mask & (ours.scores >= 0.01)
    counts = {"kept": ours.mask, "kept_by_both": both, "large": large, "large_of_both": large & theirs.mask}
    return {name: int(mask.sum()) for name, mask in counts.items()}


def main() -> None:
    """Parse, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_step_arguments(parser)
    parser.add_argument("--server-gpu", default="1")
    args = parser.parse_args()
    server, url = serve(args)
    try:
        more = {"teacher_server_urls": url, "score_ahead": True}
        trainer = make_trainer(args, ["crop"] * len(TURNS), **more)
        ahead, clock = trainer.ahead, Turns(args.device, TURNS)
        clock.attach(trainer)
        trainer.train()
        parts = {t: {part: round(clock.median(part, t, args.warmup), 3) for part in PARTS} for t in TURNS}
        details = {"student": args.student, "teacher": args.teacher, "responses": args.responses, "parts": parts}
        details |= {"compiled": args.compile, **kept_both_ways(trainer, ahead, args.responses // 4)}
        plain = parts["plain"]["seconds/rollout"] + parts["plain"]["update"]
        record("overlap_over_parts", parts["ahead"]["step"], plain, args.device, args.output, **details)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
