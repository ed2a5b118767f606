"""Callbacks of [`~crop_trl.CROPTrainer`]."""

from transformers import TrainerCallback


class StepCounter(TrainerCallback):
    """Puts the trainer's count of forward passes back where a checkpoint left it."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        updates = args.windows_per_generation * args.num_iterations
        if state.global_step % updates:
            raise ValueError(
                f"The checkpoint at step {state.global_step} lies in the middle of a batch of rollouts, which feeds "
                f"{updates} optimizer steps and is not saved; resume from a step that is a multiple of {updates}."
            )
        self.trainer._step = state.global_step * args.gradient_accumulation_steps
        self.trainer._buffered_inputs = None

    def on_step_end(self, args, state, control, **kwargs):
        # Rollouts are not part of a checkpoint, so one in the middle of a batch of them could not be resumed; written
        # all the same, it would push out a good one.
        if control.should_save and state.global_step % (args.windows_per_generation * args.num_iterations):
            control.should_save = False

    def on_train_end(self, args, state, control, **kwargs):
        if state.global_step == 0:
            raise ValueError("No step was made: the dataset has fewer usable prompts than one step takes.")
