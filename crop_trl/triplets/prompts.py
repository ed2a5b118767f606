"""The requests that are sent: four text templates, what fills them, and how their version is told.

The templates are files, so that they can be read and replaced (`--templates DIR`) without touching code. A digest of
the two that a request is made of, with the domain's words in them, goes into its key in the ledger: after a change to
the critic's instructions only the critic is asked anew.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .candidates import Candidate
from .domain import Domain, load_domain

DEFAULT_TEMPLATES = Path(__file__).parent / "templates" / "v2"

# What each template may hold; the first set must be there, or the model would not see what it has to work on.
REQUIRED = {
    "generator_system": (),
    "generator_user": ("problem", "candidate_count", "feedback"),
    "critic_system": (),
    "critic_user": ("original", "candidates_json"),
}
# Where a rule makes the counterfactual, the generator rewords and the critic solves.
REQUIRED_BY_RULE = {"generator_user": ("problem",), "critic_user": ("problem",)}
PLACEHOLDERS = {name for names in REQUIRED.values() for name in names}
_PLACEHOLDER = re.compile(r"\{(\w+)\}")

_SURROGATE = re.compile("[\ud800-\udfff]")

FEEDBACK_OPENING = """
<feedback>
An earlier attempt at this problem was turned down. Each candidate stands below with the reasons: mend its texts where
they can be mended, or alter a different condition.
{reasons}
</feedback>
"""
FLAW_TEXTS = {
    "not_json": "it was not valid JSON (is every backslash doubled?)",
    "wrong_schema": "it did not have the form asked for",
    "cut_off": "it was cut off; write shorter texts",
    "empty": "it was empty",
    "refusal": "the request was declined",
    "content_filter": "it was filtered",
    "no_candidates": "there was no candidate in it",
    "bad_candidate": "a candidate lacked a field or held something other than text",
    "control_characters": "a text held control characters; double every backslash of LaTeX inside JSON strings",
    "invalid_unicode": "a text held broken Unicode",
}
MAX_REASON_CHARS = 1_500  # per candidate: a critic that rambles must not push the problem out of the context


@dataclass(frozen=True)
class Templates:
    """The four templates of one version, with the words of a domain in them."""

    texts: Mapping[str, str]
    version: str  # name of the folder and the first digits of a hash over all four texts
    domain: Domain

    def generator_messages(self, problem: str, candidate_count: int, feedback: str = "") -> list[dict[str, str]]:
        """Chat messages that ask for candidates; `feedback` is what [`round_feedback`] made of an earlier round."""
        values = {"problem": problem, "candidate_count": str(candidate_count), "feedback": feedback}
        return self.messages("generator", values)

    def critic_messages(self, original: str, candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        """Chat messages that ask for an evaluation of every candidate, numbered from 1 in the given order."""
        lines = (
            json.dumps({"candidate_number": number, **candidate}, ensure_ascii=False)
            for number, candidate in enumerate(candidates, start=1)
        )
        values = {"original": original, "candidates_json": "[\n" + ",\n".join(lines) + "\n]"}
        return self.messages("critic", values)

    def digest(self, kind: str) -> str:
        """A hash of the templates that `kind` of request (`generator`, `critic`) is made of."""
        return _digest([text for name, text in self.texts.items() if name.startswith(kind)])

    def messages(self, kind: str, values: Mapping[str, str]) -> list[dict[str, str]]:
        """Chat messages of this kind with `values` in the places that its templates leave."""
        # A lone surrogate, which a model can write as a JSON escape, could not be sent: UTF-8 does not hold it.
        values = {name: _SURROGATE.sub("\ufffd", value) for name, value in values.items()}
        return [
            {"role": name.removeprefix(f"{kind}_"), "content": fill(text, values).strip()}
            for name, text in self.texts.items()
            if name.startswith(kind)
        ]


def fill(template: str, values: Mapping[str, str]) -> str:
    """Put `values` into a template, in one pass: a problem may hold `{feedback}` itself, and braces of any kind."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


def load_templates(
    directory: str | Path | None = None, domain: str = "mathematics", rules: str | None = None
) -> Templates:
    """Read the template files of a directory, by default those of the package, and put a domain's words into them.
    Raises `ValueError` where one is missing, lacks a placeholder that it needs, or holds one that nothing fills."""
    default = DEFAULT_TEMPLATES.with_name(rules) if rules else DEFAULT_TEMPLATES
    folder = Path(directory) if directory else default
    loaded = load_domain(domain)
    texts = {}
    for name, required in (REQUIRED_BY_RULE if rules else REQUIRED).items():
        path = folder / f"{name}.txt"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise ValueError(
                f"`templates` {str(folder)!r} has no readable {path.name}; copy the files of {default.name} "
                "from the package and edit them."
            ) from None
        text = fill(text, loaded.placeholders)
        found = PLACEHOLDERS & set(_PLACEHOLDER.findall(text))
        if found != set(required):
            wanted = ", ".join(f"{{{placeholder}}}" for placeholder in required) or "none"
            wrong = sorted(found ^ set(required))[0]
            does = "contains" if wrong in found else "lacks"
            raise ValueError(
                f"`templates`: {path} {does} {{{wrong}}}; its placeholders are {wanted}: use all and no other."
            )
        texts[name] = text
    return Templates(texts, f"{folder.resolve().name}-{_digest(texts)}", loaded)


def _digest(texts: Any) -> str:
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:12]


def round_feedback(flaws: Iterable[str], candidates: Iterable[Candidate]) -> str:
    """What tells the generator why a round failed, or an empty text; the critic's own flaws are not its business."""
    named = [flaw.removeprefix("generator:") for flaw in flaws if flaw.startswith("generator:")]
    reasons = [f"In the reply as a whole: {FLAW_TEXTS[flaw]}." for flaw in named if flaw in FLAW_TEXTS]
    reasons += map(_candidate_reason, candidates)
    return FEEDBACK_OPENING.format(reasons="\n".join(f"- {reason}" for reason in reasons)) if reasons else ""


def _candidate_reason(candidate: Candidate) -> str:
    """Why a candidate was not taken, as JSON, and its texts."""
    fields = candidate.fields
    change = fields.get("counterfactual_condition_description") or fields.get("counterfactual_description") or ""
    wrong = [violation.replace("_", " ") for violation in candidate.violations]
    wrong += [FLAW_TEXTS[candidate.incomplete]] if candidate.incomplete in FLAW_TEXTS else []
    said = {"changed to": change, "found": wrong, "critic": candidate.evaluation or "could not judge it"}
    reasons = json.dumps(said, ensure_ascii=False)
    reasons = reasons if len(reasons) <= MAX_REASON_CHARS else reasons[:MAX_REASON_CHARS] + " ..."
    written = (f"<{kind}>\n{fields[f'{kind}_problem']}\n</{kind}>" for kind in ("paraphrase", "counterfactual"))
    return "\n".join((f"Candidate {candidate.number}: {reasons}", *written))
