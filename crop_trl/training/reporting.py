"""What a run tells Weights & Biases, trackio and TensorBoard: the trainer's own groups of metrics as sections, and
histograms, responses with coloured tokens, a card of the method. None of them is imported before a run starts that
reports to it."""

import atexit
import html
import math
import re
import string
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.integrations.integration_utils import rewrite_logs

from ..text import filled, masked_arguments, token_pieces, visible_text
from .callbacks import RolloutCallback, RolloutRecord
from .cards import card_table, method_card

RESPONSES = 4
_RESPONSE = Path(__file__).parent / "templates" / "response.html.j2"
# A table of responses is large: a run logs about this many.
TABLES = 10


def group_metrics(logs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics of training that name their own group (`selection/...`), and all others."""
    own = {name: value for name, value in logs.items() if "/" in name and not name.startswith(("eval_", "test_"))}
    return own, {name: value for name, value in logs.items() if name not in own}


def histograms(rollout: RolloutRecord) -> dict[str, np.ndarray]:
    """Values of this process's tokens whose distribution is worth a look, of all tokens and of the kept ones."""
    mask, kept = rollout.loss_mask.bool(), rollout.selection.mask.bool()
    found = {}
    if rollout.selection.scores is not None:
        scores = rollout.selection.scores.detach().float()
        found["score"], found["score_kept"] = scores[mask], scores[kept]
    if rollout.student_entropy is not None:
        found["student_entropy"], found["student_entropy_kept"] = (rollout.student_entropy[m] for m in (mask, kept))
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    # 0 at the first token of a response, towards 1 at its end.
    found["position_kept"] = (((mask.cumsum(-1) - 1) / length).clamp(min=0))[kept]
    # In float64, since values one rounding of fp32 apart leave no room for bins between them.
    arrays = {f"histograms/{name}": values.double().cpu().numpy() for name, values in found.items()}
    finite = {name: values[np.isfinite(values)] for name, values in arrays.items()}
    return {name: values for name, values in finite.items() if values.size}


@dataclass(frozen=True)
class ExampleResponse:
    """One response for reading: tokens, which are kept (`None`: not the student's), and their scores."""

    prompt: str
    pieces: list[str]
    kept: list[bool | None]
    scores: list[float] | None

    @property
    def kept_share(self) -> float:
        """Share of the student's tokens that is kept."""
        return sum(map(bool, self.kept)) / max(len(self.kept) - self.kept.count(None), 1)

    def to_html(self) -> str:
        """Tokens on blue (orange below 0) as strong as their score, the kept ones framed; values on hover."""
        scores = self.scores if self.scores is not None else [0.0] * len(self.pieces)
        limit = max((abs(score) for score in scores if np.isfinite(score)), default=0.0)
        shares = [min(abs(score) / (limit or 1.0), 1.0) if np.isfinite(score) else 0.0 for score in scores]
        tokens = zip(map(visible_text, self.pieces), self.kept, scores, shares)
        return filled(_RESPONSE, prompt=visible_text(self.prompt), tokens=tokens, scored=self.scores, limit=limit)

    def to_markdown(self) -> str:
        """The prompt, then the response with kept tokens in bold, for backends that show no HTML."""
        parts = []
        for piece, kept in zip(self.pieces, self.kept):
            text = _plain_markdown(piece)
            core = text.strip()
            parts.append(text.replace(core, f"**{core}**", 1) if kept and core else text)
        return f"{_lines(_plain_markdown(self.prompt))}\n\n---\n\n{_lines(''.join(parts).replace('****', ''))}"


_MARKS = frozenset(string.punctuation) - frozenset(",;:?'\"/%@")


def _plain_markdown(text: str) -> str:
    # Entities, since dialects of Markdown differ in what a backslash escapes.
    return "".join(f"&#{ord(c)};" if c in _MARKS else c for c in visible_text(text))


def _lines(text: str) -> str:
    # Kept line breaks, and no indented line: that would be a block of code.
    return re.sub(r"\n( *)", lambda found: "  \n" + "&#160;" * len(found[1]), text)


def example_responses(rollout: RolloutRecord, count: int = RESPONSES) -> list[ExampleResponse]:
    """Responses spread over this process's batch, so of different prompts where there are any."""
    total = len(rollout.completion_ids)
    prompts = rollout.texts.get("original", [""] * total)
    examples = []
    for row in sorted({round(i * total / count) for i in range(count)} & set(range(total))):
        n = len(rollout.completion_ids[row])
        kept, own, scores = rollout.selection.mask[row, :n], rollout.loss_mask[row, :n].bool(), rollout.selection.scores
        examples.append(
            ExampleResponse(
                prompts[row],
                token_pieces(rollout.tokenizer, rollout.completion_ids[row]),
                [k if o else None for k, o in zip(kept.tolist(), own.tolist())],
                None if scores is None else scores[row, :n].masked_fill(~own, math.nan).tolist(),
            )
        )
    return examples


def _card_html(card: Mapping[str, str]) -> str:
    rows = "".join(
        f'<tr><td style="padding:2px 16px 2px 0;color:#666">{html.escape(k)}</td><td>{html.escape(v)}</td></tr>'
        for k, v in card.items()
    )
    return f'<table style="font:14px sans-serif;color:#111;background:#fff">{rows}</table>'


class RunReports(RolloutCallback, ABC):
    """What all backends are sent, each subclass says how; `settings` go to the run's configuration and the card."""

    # What a user can do when the backend does not start.
    remedy: str

    def __init__(self, settings: Mapping[str, Any] | None = None):
        super().__init__()
        self.settings = dict(settings or {})
        self._last_table: int | None = None
        self._started = False

    def start(self, args, state, control, **kwargs) -> None:
        """Open the backend, unless it is open. Raises `ValueError` with reason and remedy where it does not open."""
        if self._started:
            return
        try:
            super().on_train_begin(args, state, control, **kwargs)
        except Exception as error:
            name = type(self).__name__.removesuffix("Reports").lower()
            reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
            raise ValueError(f"`report_to` {name} does not start ({reason}); {self.remedy}.") from error
        self._started = True

    def on_train_begin(self, args, state, control, **kwargs):
        self.start(args, state, control, **kwargs)
        if state.is_world_process_zero:
            self.send_card(method_card(args, self.settings), state.global_step)

    def on_rollout(self, args, state, control, rollout: RolloutRecord, **kwargs):
        if not state.is_world_process_zero or not feeds_logged_step(args, state, rollout.step):
            return
        try:
            self.send_histograms(histograms(rollout), rollout.step)
            if self._last_table is None or rollout.step - self._last_table >= state.max_steps / TABLES:
                self._last_table = rollout.step
                self.send_responses(example_responses(rollout), rollout.step)
        except Exception as error:
            # A picture is not worth a run of hours.
            said = f"could not show the rollouts of step {rollout.step} ({type(error).__name__}: {error})"
            warnings.warn(f"{type(self).__name__} {said}.", stacklevel=2)

    def send_page(self, path: Path) -> None:
        """Keep the page that a run ends with; by default not."""

    @abstractmethod
    def send_card(self, card: Mapping[str, str], step: int) -> None:
        """Show the method's card and keep the settings."""

    @abstractmethod
    def send_histograms(self, values: Mapping[str, np.ndarray], step: int) -> None:
        """Show distributions."""

    @abstractmethod
    def send_responses(self, responses: Sequence[ExampleResponse], step: int) -> None:
        """Show responses."""


def feeds_logged_step(args, state, step: int) -> bool:
    """Whether metrics are logged after one of the optimizer steps that the rollouts sampled at `step` feed."""
    last = step + args.steps_per_rollout_batch
    strategy = str(getattr(args.logging_strategy, "value", args.logging_strategy))
    if strategy == "no":
        return False
    every = state.logging_steps if strategy == "steps" else math.ceil(state.max_steps / max(1, state.num_train_epochs))
    every = max(1, int(every))
    first = step == 0 and args.logging_first_step
    return first or last // every > step // every or last >= state.max_steps


class PanelReports(RunReports):
    """Weights & Biases and trackio: logged objects are panels, made by classes of the same names in both packages.

    Subclasses have `_package`, the imported one while a run of it is open; `log`; and `response_panels` by name."""

    def send_card(self, card, step):
        self._package.config.update({**self.settings, "method_card": dict(card)}, allow_val_change=True)
        self.log({"method_card": self._package.Html(_card_html(card))}, step)

    def send_page(self, path):
        self._package.log_artifact(str(path), type="page")

    def send_histograms(self, values, step):
        self.log({name: self._package.Histogram(array) for name, array in values.items()}, step + 1)

    def send_responses(self, responses, step):
        self.log(self.response_panels(responses, step), step + 1)


class WandbReports(PanelReports, WandbCallback):
    """Weights & Biases: everything."""

    remedy = "log in with `wandb login`, or set WANDB_MODE=offline"

    _package = property(lambda self: self._wandb)

    def setup(self, args, state, model, **kwargs):
        """Start the run, which keeps the command line: without what is secret in it."""
        given, sys.argv = sys.argv, masked_arguments(sys.argv)
        try:
            super().setup(args, state, model, **kwargs)
        finally:
            sys.argv = given

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        own, others = group_metrics(logs)
        if not self._initialized:
            self.setup(args, state, model)
        if own and state.is_world_process_zero:
            # One row of the run's history for both.
            self._wandb.log(own, commit=False)
        super().on_log(args, state, control, model=model, logs=others, **kwargs)

    def log(self, values, step):
        """Log metrics or panels that belong to a count of updates."""
        self._wandb.log({**values, "train/global_step": step})

    def response_panels(self, responses, step):
        """A table of them."""
        rows = [[step + 1, r.prompt, self._package.Html(r.to_html()), round(r.kept_share, 3)] for r in responses]
        columns = ["step", "prompt", "response", "kept share"]
        return {"rollouts/responses": self._package.Table(columns=columns, data=rows)}


class TrackioReports(PanelReports, TrackioCallback):
    """trackio: everything. Its tables show no HTML, so each response has a panel of its own."""

    remedy = "set TRACKIO_DIR to a folder that can be written"

    _package = property(lambda self: self._trackio)

    def setup(self, args, state, model, **kwargs):
        """Open a run, until the process ends: what is measured after training belongs to it too."""
        super().setup(args, state, model, **kwargs)
        if state.is_world_process_zero:
            self._run = self._trackio.context_vars.current_run.get()
            self._end = partial(super().on_train_end, args, state, None, model=model)
            atexit.register(self.close)

    def on_train_end(self, args, state, control, **kwargs):
        """Leave the run open, see `setup`."""

    def close(self) -> None:
        """Send what is left and end the run, unless another has begun since."""
        if self._trackio.context_vars.current_run.get() is self._run:
            self._end()

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        own, others = group_metrics(logs)
        if not self._initialized:
            self.setup(args, state, model)
        if state.is_world_process_zero:
            self.log({**own, **rewrite_logs(others)}, state.global_step)

    def log(self, values, step):
        """Log metrics or panels that belong to a count of updates."""
        # Its own step is the axis of its charts, and would rise with every call.
        self._trackio.log({**values, "train/global_step": step}, step=step)

    def response_panels(self, responses, step):
        """One for each."""
        return {
            f"rollouts/response_{number}": self._package.Html(r.to_html(), caption=f"{r.kept_share:.0%} kept")
            for number, r in enumerate(responses, start=1)
        }


class TensorBoardReports(RunReports, TensorBoardCallback):
    """TensorBoard: metrics, histograms, and texts in which kept tokens are bold."""

    remedy = "set TENSORBOARD_LOGGING_DIR to a folder that can be written"

    def on_log(self, args, state, control, logs=None, **kwargs):
        own, others = group_metrics(logs)
        super().on_log(args, state, control, logs=others, **kwargs)
        if state.is_world_process_zero and self.tb_writer is not None:
            for name, value in own.items():
                self.tb_writer.add_scalar(name, value, state.global_step)
            self.tb_writer.flush()

    def send_card(self, card, step):
        self.tb_writer.add_text("method_card", card_table(card), step)
        if self.settings:
            self.tb_writer.add_text("settings", card_table({k: str(v) for k, v in self.settings.items()}), step)

    def send_histograms(self, values, step):
        for name, array in values.items():
            self.tb_writer.add_histogram(name, array, step + 1)

    def send_responses(self, responses, step):
        for number, response in enumerate(responses):
            self.tb_writer.add_text(f"rollouts/response_{number + 1}", response.to_markdown(), step + 1)


_REPORTS = {WandbCallback: WandbReports, TrackioCallback: TrackioReports, TensorBoardCallback: TensorBoardReports}


def place_reports(trainer) -> None:
    """Replace a trainer's callbacks of Weights & Biases, trackio and TensorBoard by those here."""
    for standard, own in _REPORTS.items():
        if any(type(callback) is standard for callback in trainer.callback_handler.callbacks):
            trainer.remove_callback(standard)
            trainer.add_callback(own(trainer.run_settings))


def start_reports(trainer) -> None:
    """Start what a trainer reports to, unless it runs; Raises `ValueError` where one does not start."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, RunReports):
            callback.start(trainer.args, trainer.state, trainer.control, model=trainer.model)


def send_page(trainer, path: Path) -> None:
    """Hand the page that a run ends with to what it reports to."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, RunReports):
            try:
                callback.send_page(path)
            except Exception as error:
                warnings.warn(f"{type(callback).__name__} could not keep {str(path)!r} ({error}).", stacklevel=2)
