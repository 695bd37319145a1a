"""Context: fields checked at the door, masks of every kind understood or refused."""

from __future__ import annotations

import pytest
import torch

from moesaic.routing import Context


def test_rejects_fields_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"group_T has 3 rows, other fields of the context have 4"):
        Context(torch.ones(4, dtype=torch.bool), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="token_mask_T must be bool"):
        Context(torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="position_T must be int64"):
        Context(position_T=torch.zeros(4))
    with pytest.raises(ValueError, match=r"group_T must have shape \(T,\)"):
        Context(group_T=torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="phase must be one of"):
        Context(phase="test")


def test_is_immutable_and_keeps_its_own_conditions() -> None:
    conditions = {"text": torch.zeros(2)}
    context = Context(condition=conditions)
    conditions["late"] = torch.zeros(1)
    assert list(context.condition) == ["text"]
    with pytest.raises(TypeError):
        context.condition["late"] = torch.zeros(1)  # type: ignore[index]
    with pytest.raises(AttributeError):
        context.phase = "train"  # type: ignore[misc]
    changed = context.replace(phase="decode")
    assert changed.phase == "decode"
    assert context.phase is None
    assert list(changed.condition) == ["text"]


def test_require_names_what_is_missing_and_how_to_give_it() -> None:
    context = Context(group_T=torch.zeros(3, dtype=torch.int64), condition={"task": torch.zeros(1)})
    context.require(("group_T", "condition:task"), "Part")
    with pytest.raises(ValueError, match=r"Part needs condition:text .*group_T.*condition:task.*condition=\{'text'"):
        context.require(("condition:text",), "Part")
    with pytest.raises(ValueError, match=r"has nothing: pass Context\(position_T=...\)"):
        Context().require(("position_T",), "Part")
    with pytest.raises(ValueError, match="4 rows and a context for 3"):
        context.check_rows(4, "Part")
    Context(condition={"task": torch.zeros(1)}).check_rows(4, "Part")


@pytest.mark.case("C07")
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8])
def test_two_dimensional_masks_of_any_integer_kind(dtype: torch.dtype) -> None:
    mask_BS = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).to(dtype)
    context = Context.from_mask(mask_BS, 2, 4)
    assert context.token_mask_T is not None
    assert context.token_mask_T.tolist() == [False, False, True, True, True, True, True, True]
    assert context.group_T is not None
    assert context.group_T.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert context.position_T is not None
    assert context.position_T.tolist() == [0, 0, 0, 1, 0, 1, 2, 3]


@pytest.mark.case("C07")
def test_a_mask_of_segment_numbers_counts_each_token_once() -> None:
    context = Context.from_mask(torch.tensor([[1, 1, 2, 2, 0]]), 1, 5)
    assert context.position_T is not None
    assert context.position_T.tolist() == [0, 1, 2, 3, 3]
    assert context.token_mask_T is not None
    assert context.token_mask_T.tolist() == [True] * 4 + [False]


@pytest.mark.case("C07")
def test_masks_that_do_not_say_what_is_padding_are_refused() -> None:
    additive_4d = torch.zeros(2, 1, 4, 4)
    packed = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool().expand(2, 1, 4, 4)
    for mask in (additive_4d, packed):
        with pytest.raises(ValueError, match=r"got \(2, 1, 4, 4\).*2-D padding mask"):
            Context.from_mask(mask, 2, 4)
    with pytest.raises(ValueError, match="float32: an additive mask is ambiguous"):
        Context.from_mask(torch.zeros(2, 4), 2, 4)
    with pytest.raises(ValueError, match=r"\(3, >= 4\), got \(2, 4\)"):
        Context.from_mask(torch.ones(2, 4, dtype=torch.bool), 3, 4)
    with pytest.raises(ValueError, match=r">= 5\), got \(2, 4\)"):
        Context.from_mask(torch.ones(2, 4, dtype=torch.bool), 2, 5)


@pytest.mark.case("C07")
def test_a_decode_step_takes_the_last_columns_of_a_mask_over_the_past() -> None:
    mask_BS = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    context = Context.from_mask(mask_BS, 2, 1, phase="decode")
    assert context.num_rows == 2
    assert context.token_mask_T is not None
    assert context.token_mask_T.tolist() == [True, True]
    assert context.position_T is not None
    assert context.position_T.tolist() == [2, 4]


def test_without_a_mask_every_row_is_real() -> None:
    context = Context.from_mask(None, 2, 3)
    assert context.token_mask_T is None
    assert context.position_T is not None
    assert context.position_T.tolist() == [0, 1, 2, 0, 1, 2]
    given = Context.from_mask(None, 2, 3, position_BS=torch.tensor([5, 6, 7]))
    assert given.position_T is not None
    assert given.position_T.tolist() == [5, 6, 7, 5, 6, 7]
    with pytest.raises(ValueError, match="position_BS must have shape"):
        Context.from_mask(None, 2, 3, position_BS=torch.zeros(2, 1, dtype=torch.int64))
