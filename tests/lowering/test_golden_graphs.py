"""Rewritten graphs in full, as text: what vanished, what appeared, and with which options."""

from __future__ import annotations

import torch
from expecttest import TestCase

from lowering.forms import FORMS, Dims
from lowering.rewriting import check, listing


def rewritten(id: str, *, dynamic: bool = False, no_grad: bool = False) -> str:
    context = torch.no_grad if no_grad else torch.enable_grad
    backend = check(lambda: FORMS[id].make(Dims()), dynamic=dynamic, context=context)
    (graph,) = backend.graphs
    return listing(graph)


class TestGoldenGraphs(TestCase):
    def test_a01_linear_view_cross_entropy(self) -> None:
        self.assertExpectedInline(
            rewritten("A01"),
            """\
l_self_modules_head_parameters_weight_ = input
l_x_ = input
l_y_ = input
view_1 = .view(l_y_, -1)
reshape = .reshape(l_x_, -1, 8)
linear_cross_entropy_default = greyhound.linear_cross_entropy(
    reshape,
    l_self_modules_head_parameters_weight_,
    view_1,
    None,
    None,
    ignore_index=-100,
    reduction=mean,
    label_smoothing=0.0,
    logit_scale=1.0,
    softcap=None,
    empty_mean_is_nan=True,
    chunk_size=5,
    grad_weight_accum_dtype=fp32,
    compute_dtype=torch.float32,
    need_grad_input=True,
    need_grad_weight=True,
    need_grad_bias=False,)
getitem = getitem(linear_cross_entropy_default, 0)
return [getitem]""",
        )

    def test_a07_addmm_under_no_grad(self) -> None:
        self.assertExpectedInline(
            rewritten("A07", no_grad=True),
            """\
l_x_ = input
l_self_modules_head_parameters_bias_ = input
l_self_modules_head_parameters_weight_ = input
l_y_ = input
rows = .view(l_x_, -1, 8)
t = .t(l_self_modules_head_parameters_weight_)
view_1 = .view(l_y_, -1)
detach = .detach(rows)
detach_1 = .detach(t)
t_1 = .t(detach_1)
detach_2 = .detach(l_self_modules_head_parameters_bias_)
linear_cross_entropy_default = greyhound.linear_cross_entropy(
    detach,
    t_1,
    view_1,
    detach_2,
    None,
    ignore_index=-100,
    reduction=mean,
    label_smoothing=0.0,
    logit_scale=1.0,
    softcap=None,
    empty_mean_is_nan=True,
    chunk_size=5,
    grad_weight_accum_dtype=fp32,
    compute_dtype=torch.float32,
    need_grad_input=False,
    need_grad_weight=False,
    need_grad_bias=False,)
getitem = getitem(linear_cross_entropy_default, 0)
return [getitem]""",
        )

    def test_b05_shifted_logits(self) -> None:
        self.assertExpectedInline(
            rewritten("B05"),
            """\
l_self_modules_head_parameters_weight_ = input
l_x_ = input
l_y_ = input
getitem_1 = getitem(l_y_, [..., 1::])
shifted_target = .contiguous(getitem_1)
view_1 = .view(shifted_target, -1)
getitem_2 = getitem(l_x_, [::, :-1:, ::])
reshape = .reshape(getitem_2, -1, 8)
linear_cross_entropy_default = greyhound.linear_cross_entropy(
    reshape,
    l_self_modules_head_parameters_weight_,
    view_1,
    None,
    None,
    ignore_index=-100,
    reduction=mean,
    label_smoothing=0.0,
    logit_scale=1.0,
    softcap=None,
    empty_mean_is_nan=True,
    chunk_size=5,
    grad_weight_accum_dtype=fp32,
    compute_dtype=torch.float32,
    need_grad_input=True,
    need_grad_weight=True,
    need_grad_bias=False,)
getitem_3 = getitem(linear_cross_entropy_default, 0)
return [getitem_3]""",
        )

    def test_d01_softcap(self) -> None:
        self.assertExpectedInline(
            rewritten("D01"),
            """\
l_self_modules_head_parameters_weight_ = input
l_x_ = input
l_y_ = input
view_1 = .view(l_y_, -1)
reshape = .reshape(l_x_, -1, 8)
linear_cross_entropy_default = greyhound.linear_cross_entropy(
    reshape,
    l_self_modules_head_parameters_weight_,
    view_1,
    None,
    None,
    ignore_index=-100,
    reduction=mean,
    label_smoothing=0.0,
    logit_scale=1.0,
    softcap=30.0,
    empty_mean_is_nan=True,
    chunk_size=5,
    grad_weight_accum_dtype=fp32,
    compute_dtype=torch.float32,
    need_grad_input=True,
    need_grad_weight=True,
    need_grad_bias=False,)
getitem = getitem(linear_cross_entropy_default, 0)
return [getitem]""",
        )

    def test_l08_everything_at_once(self) -> None:
        self.assertExpectedInline(
            rewritten("L08"),
            """\
l_self_modules_head_parameters_weight_ = input
l_x_ = input
l_y_ = input
l_self_buffers_class_weight_ = input
view_1 = .view(l_y_, -1)
reshape = .reshape(l_x_, -1, 8)
linear_cross_entropy_default = greyhound.linear_cross_entropy(
    reshape,
    l_self_modules_head_parameters_weight_,
    view_1,
    None,
    l_self_buffers_class_weight_,
    ignore_index=-100,
    reduction=mean,
    label_smoothing=0.1,
    logit_scale=1.0,
    softcap=None,
    empty_mean_is_nan=True,
    chunk_size=5,
    grad_weight_accum_dtype=fp32,
    compute_dtype=torch.float32,
    need_grad_input=True,
    need_grad_weight=True,
    need_grad_bias=False,)
getitem = getitem(linear_cross_entropy_default, 0)
return [getitem]""",
        )
