"""The clipped sampled-token loss: stored values, a slow reference, hand-computed clipping, and its gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import CASES, assert_close, load_case, loss

from crop_trl.methods.divergence import target_divergence
from crop_trl.training.loss import opd_terms, sampled_opd_loss

both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def batch(seed: int, n_rows: int = 8, width: int = 11) -> dict[str, torch.Tensor]:
    """Arguments of the loss, with ratios on both sides of the clipping range and uneven selections."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -normal(n_rows, width).abs()
    mask = torch.rand(n_rows, width, generator=generator) < torch.linspace(0.0, 0.9, n_rows)[:, None]
    return {
        "logprobs": old + 0.3 * normal(n_rows, width),
        "old_logprobs": old,
        "teacher_logprobs": old + normal(n_rows, width),
        "base_advantages": normal(n_rows),
        "loss_mask": mask,
    }


def value_and_gradient(arguments: dict, **options) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = arguments["logprobs"].clone().requires_grad_()
    value = sampled_opd_loss(**{**arguments, "logprobs": logprobs}, **options)
    (gradient,) = torch.autograd.grad(value, logprobs)
    return value.detach(), gradient


def slow(arguments: dict, weights=None, **options) -> float:
    lists = {name: tensor.tolist() for name, tensor in arguments.items()}
    return loss(
        lists["logprobs"],
        lists["old_logprobs"],
        lists["teacher_logprobs"],
        lists["base_advantages"],
        lists["loss_mask"],
        weights=None if weights is None else weights.tolist(),
        **options,
    )


# --- Stored values ----------------------------------------------------------------------------------------------------


@both_precisions
@pytest.mark.parametrize("name", CASES)
def test_golden_losses(name, dtype):
    """Every stored loss from its stored mask, weights and target: the loss knows no method."""
    case, _, loss_mask = load_case(name, dtype)
    expected, logprobs = case["expected"], case["logprobs"]
    targets = {"credit": expected["credit_teacher"]["0.1"]}
    weights = {"iw-opd": torch.tensor(expected["iw_weights"], dtype=dtype)}
    assert {"opd", "crop", "crop-bottom", "cf-opd", "pc-opd"} <= set(expected["losses"])
    for method, value in expected["losses"].items():
        actual = sampled_opd_loss(
            torch.tensor(logprobs["new"], dtype=dtype),
            torch.tensor(logprobs["old"], dtype=dtype),
            torch.tensor(targets.get(method, logprobs["teacher"]), dtype=dtype),
            torch.tensor(case["base_advantage"], dtype=dtype),
            torch.tensor(expected["masks"][method]) if method in expected["masks"] else loss_mask,
            weights=weights.get(method),
        )
        assert_close(actual, value, dtype)


# --- Slow reference ---------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 2**31),
    st.booleans(),
    st.sampled_from([1.0, 0.0, 0.3]),
    st.sampled_from([(0.2, 0.28), (0.1, 0.5)]),
    st.sampled_from([None, 7, 0]),
)
@settings(max_examples=80)
def test_matches_reference(seed, weighted, lambda_opd, clip, num_items):
    arguments = batch(seed, 3, 6)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = 0.5 + torch.rand(3, 6, generator=generator, dtype=torch.float64) if weighted else None
    value = sampled_opd_loss(
        **arguments,
        weights=weights,
        lambda_opd=lambda_opd,
        epsilon_low=clip[0],
        epsilon_high=clip[1],
        num_items=num_items,
    )
    expected = slow(arguments, weights, lambda_opd=lambda_opd, low=clip[0], high=clip[1], num_items=num_items)
    assert value.item() == pytest.approx(expected, abs=1e-12)


def test_gradient_matches_differences_of_the_reference():
    arguments = batch(21, 4, 5)
    _, gradient = value_and_gradient(arguments)
    step = 1e-6
    for row in range(4):
        for t in range(5):
            moved = [dict(arguments, logprobs=arguments["logprobs"].clone()) for _ in "+-"]
            moved[0]["logprobs"][row, t] += step
            moved[1]["logprobs"][row, t] -= step
            difference = (slow(moved[0]) - slow(moved[1])) / (2 * step)
            assert gradient[row, t].item() == pytest.approx(difference, abs=1e-8)


# --- By hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ratio, advantage, value, slope",
    [
        (1.0, 2.0, -2.0, -2.0),  # the first update of a rollout: ratio one, plain policy gradient
        (1.0, -2.0, 2.0, 2.0),
        (1.2, 1.0, -1.2, -1.2),  # inside the range
        (0.9, -1.0, 0.9, 0.9),
        (1.5, 1.0, -1.28, 0.0),  # a good token pushed far enough
        (0.5, -1.0, 0.8, 0.0),  # a bad one pulled far enough
        (1.5, -1.0, 1.5, 1.5),  # the wrong way round: never clipped
        (0.5, 1.0, -0.5, -0.5),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipping(ratio, advantage, value, slope):
    arguments = {
        "logprobs": torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64),
        "old_logprobs": torch.tensor([[-1.0]], dtype=torch.float64),
        "teacher_logprobs": torch.tensor([[-1.0]], dtype=torch.float64),
        "base_advantages": torch.tensor([advantage], dtype=torch.float64),
        "loss_mask": torch.ones(1, 1),
    }
    actual, gradient = value_and_gradient(arguments)
    assert actual.item() == pytest.approx(value, abs=1e-12)
    assert gradient.item() == pytest.approx(slope, abs=1e-12)


def test_advantage_moves_towards_the_teacher():
    old, teacher = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.5, -3.0]])

    def advantages(base: float, **settings):
        return opd_terms(old, old, teacher, torch.full((1, 2), base), **settings).advantages.tolist()

    assert advantages(0.0) == [[0.5, -2.0]]
    assert advantages(10.0) == [[10.5, 8.0]]
    assert advantages(10.0, lambda_opd=0.5) == [[10.25, 9.0]]
    # Weights multiply the whole advantage, base included.
    assert advantages(10.0, weights=torch.tensor([[2.0, 0.5]])) == [[21.0, 4.0]]


@pytest.mark.parametrize("lambda_opd", [1.0, 0.3, 0.0])
def test_a_divergence_takes_the_place_of_the_gap(lambda_opd):
    """Without ratio or clip; weights multiply it, and the reward keeps the term that it has beside the gap."""
    arguments = batch(7)
    generator = torch.Generator().manual_seed(8)
    weights, divergence = (torch.rand(8, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    arguments["base_advantages"] = arguments["base_advantages"][:, None].expand(8, 11)
    del arguments["loss_mask"]
    for name in ("logprobs", "divergence"):
        arguments[name] = (divergence if name == "divergence" else arguments[name]).clone().requires_grad_()
    terms = opd_terms(**arguments, weights=weights, lambda_opd=lambda_opd)
    slopes = torch.autograd.grad(terms.loss.sum(), (arguments["logprobs"], arguments["divergence"]))
    reward = opd_terms(**{**arguments, "divergence": None}, weights=weights, lambda_opd=0.0)
    torch.testing.assert_close(terms.loss, reward.loss + lambda_opd * weights * divergence)
    torch.testing.assert_close(terms.advantages, weights * arguments["base_advantages"])
    torch.testing.assert_close(slopes[0], torch.autograd.grad(reward.loss.sum(), arguments["logprobs"])[0])
    torch.testing.assert_close(slopes[1], lambda_opd * weights)


def test_over_all_tokens_that_could_be_drawn_the_sampled_loss_is_the_reverse_divergence():
    """The advantage depends on the token; a number that does not, such as the divergence itself, moves nothing."""
    logits, teacher = torch.randn(2, 9, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    logits.requires_grad_()
    logprobs, teacher = logits.log_softmax(-1), teacher.log_softmax(-1)
    no_rest = torch.cat([logprobs, torch.tensor([-1e30])])
    divergence = target_divergence(teacher, no_rest, "reverse")
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)

    def over_draws(per_token):
        return torch.autograd.grad((logprobs.detach().exp() * per_token).sum(), logits, retain_graph=True)[0]

    old, none = logprobs.detach(), torch.zeros(9)
    torch.testing.assert_close(over_draws(opd_terms(logprobs, old, teacher, none).loss), expected)
    reward = opd_terms(logprobs, old, teacher, -divergence.detach().expand(9), lambda_opd=0.0)
    torch.testing.assert_close(over_draws(reward.loss), torch.zeros(9, dtype=torch.float64))


def test_base_advantages_belong_to_rows():
    arguments = batch(5, 3, 4)
    arguments["teacher_logprobs"] = arguments["old_logprobs"]
    arguments["base_advantages"] = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
    arguments["logprobs"] = arguments["old_logprobs"]
    arguments["loss_mask"] = torch.ones(3, 4)
    _, gradient = value_and_gradient(arguments)
    assert gradient.tolist() == [[0.0] * 4, pytest.approx([-1 / 12] * 4), pytest.approx([2 / 12] * 4)]


def test_only_the_student_gets_a_gradient():
    arguments = {name: x.requires_grad_(x.is_floating_point()) for name, x in batch(6).items()}
    weights = torch.ones(8, 11, dtype=torch.float64, requires_grad=True)
    sampled_opd_loss(**arguments, weights=weights).backward()
    assert arguments["logprobs"].grad is not None
    assert all(arguments[name].grad is None for name in ("old_logprobs", "teacher_logprobs", "base_advantages"))
    assert weights.grad is None


# --- The denominator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_per_split", [1, 2, 4, 8])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_splits_add_up(rows_per_split, as_tensor):
    """1x8, 2x4, 4x2 and 8x1 give one loss and one gradient, although their selections differ in size."""
    arguments = batch(31)
    whole, gradient = value_and_gradient(arguments)
    n_selected = int(arguments["loss_mask"].sum())
    # The first row has no selected token at all, and no two rows as many.
    assert arguments["loss_mask"].sum(-1)[0] == 0 and n_selected % 8
    values, gradients = [], []
    for start in range(0, 8, rows_per_split):
        part = {name: x[start : start + rows_per_split] for name, x in arguments.items()}
        value, slope = value_and_gradient(part, num_items=torch.tensor(n_selected) if as_tensor else n_selected)
        values.append(value)
        gradients.append(slope)
    torch.testing.assert_close(sum(values), whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat(gradients), gradient, rtol=1e-12, atol=1e-14)


def test_order_of_rows_is_irrelevant():
    arguments = batch(32)
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    value, gradient = value_and_gradient(arguments)
    shuffled, shuffled_gradient = value_and_gradient({name: x[order] for name, x in arguments.items()})
    torch.testing.assert_close(shuffled, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(shuffled_gradient, gradient[order], rtol=1e-12, atol=0)


def test_long_and_short_responses_weigh_by_tokens():
    """A token mean, not a mean of response means."""
    arguments = batch(33, 2, 4)
    arguments["logprobs"] = arguments["old_logprobs"]
    arguments["teacher_logprobs"] = arguments["old_logprobs"]
    arguments["base_advantages"] = torch.tensor([1.0, 5.0], dtype=torch.float64)
    arguments["loss_mask"] = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0]])
    assert sampled_opd_loss(**arguments).item() == pytest.approx(-(3 * 1.0 + 5.0) / 4)


def test_nothing_selected_is_zero():
    arguments = batch(34)
    arguments["loss_mask"] = torch.zeros(8, 11)
    for num_items in (None, 0, 12, torch.tensor(0)):
        value, gradient = value_and_gradient(arguments, num_items=num_items)
        assert value.item() == 0.0
        assert not gradient.any()


# --- The mask ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_values_outside_the_mask_are_harmless(poison):
    arguments = batch(41)
    weights = torch.rand(8, 11, dtype=torch.float64)
    clean_value, clean_gradient = value_and_gradient(arguments, weights=weights)
    outside = ~arguments["loss_mask"]
    poisoned = {
        name: x.masked_fill(outside, poison) if name.endswith("logprobs") else x for name, x in arguments.items()
    }
    # A row without a selected token may have no base advantage either.
    poisoned["base_advantages"] = arguments["base_advantages"].masked_fill(outside.all(-1), poison)
    value, gradient = value_and_gradient(poisoned, weights=weights.masked_fill(outside, poison))
    assert torch.equal(value, clean_value)
    assert torch.equal(gradient, clean_gradient)
    assert not gradient[outside].any()


def test_dense_mask_equals_no_mask():
    arguments = batch(42)
    dense, gradient = value_and_gradient({**arguments, "loss_mask": torch.ones(8, 11)})
    new = arguments["logprobs"].clone().requires_grad_()
    advantages = arguments["base_advantages"][:, None] + arguments["teacher_logprobs"] - arguments["old_logprobs"]
    ratio = (new - arguments["old_logprobs"]).exp()
    plain = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).mean()
    plain.backward()
    torch.testing.assert_close(dense, plain.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, new.grad, rtol=1e-12, atol=1e-16)


def test_flipping_one_entry_changes_the_gradient():
    arguments = batch(43, 3, 5)
    arguments["logprobs"] = arguments["old_logprobs"]  # nothing is clipped
    _, before = value_and_gradient(arguments)
    for row in range(3):
        for t in range(5):
            mask = arguments["loss_mask"].clone()
            mask[row, t] ^= True
            _, after = value_and_gradient({**arguments, "loss_mask": mask})
            assert (before[row, t] == 0) == bool(mask[row, t])
            assert (after[row, t] != 0) == bool(mask[row, t])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_any_kind_of_mask(dtype):
    arguments = batch(44)
    value = sampled_opd_loss(**arguments)
    assert torch.equal(sampled_opd_loss(**{**arguments, "loss_mask": arguments["loss_mask"].to(dtype)}), value)
