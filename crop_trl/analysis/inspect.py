"""Look at what a trainer chooses in one response."""

from collections.abc import Mapping
from typing import Any

import torch

from ..methods import get_method, select
from ..scoring import TopKLogprobs
from ..signals import collect_signals, prompt_kinds, prompt_variants, tokenize_variants
from .heatmap import ResponseHeatmap, response_heatmap

_TRIPLET = ("teacher/original", "teacher/paraphrase", "teacher/counterfactual")


def inspect_response(trainer, row: Mapping[str, Any]) -> ResponseHeatmap:
    """
    Sample one response to a triplet, score it after its three prompts, and mark what the trainer's method keeps.

    A method that ranks against unrelated prompts needs a batch, so the tokens that `crop` would keep are shown instead,
    and the note says so. Every process has to call this, whatever it does with the result.

    Args:
        trainer ([`~crop_trl.CROPTrainer`]):
            Before, during or after training.
        row (mapping):
            A dataset row with all three prompts.

    Returns:
        [`~crop_trl.analysis.heatmap.ResponseHeatmap`]
    """
    trained = trainer.args.method
    needs_batch = "teacher/negative" in get_method(trained).needs
    method = trained
    if needs_batch:
        method = "crop" if get_method(trained).score else "opd"
    prompt_ids = {
        kind: tokenize_variants([row], kind, lambda prompts: trainer._tokenize_prompts(prompts)[0])
        for kind in prompt_kinds(_TRIPLET)
    }
    was_training = trainer.model.training
    trainer.model.eval()
    try:
        completion_ids, _ = trainer._generate_single_turn(prompt_ids["original"][0], None, {}, num_generations=1)
        needs = [*_TRIPLET, *(need for need in get_method(method).needs if need not in _TRIPLET)]
        signals = collect_signals(needs, trainer.scorers, prompt_ids, completion_ids)
    finally:
        trainer.model.train(was_training)
    loss_mask = torch.ones_like(signals["teacher/original"].sampled_logprobs, dtype=torch.bool)
    selection = select(method, signals, loss_mask, trainer.args.selection_settings, step=trainer.state.global_step)
    share = selection.mask.float().mean().item()
    return response_heatmap(
        trainer._tokenizer,
        completion_ids[0],
        *(first if isinstance(first := signals[name], TopKLogprobs) else first[0] for name in _TRIPLET),
        kept=selection.mask[0],
        prompt=row["prompt"],
        paraphrase_prompt=prompt_variants(row, "paraphrase")[0],
        counterfactual_prompt=prompt_variants(row, "counterfactual")[0],
        note=f"Framed: the {share:.0%} of this response that method {method!r} trains, after step "
        f"{trainer.state.global_step}." + ("" if method == trained else f" The run used {trained!r}."),
    )
