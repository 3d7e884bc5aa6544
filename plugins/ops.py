"""Every op that has a kernel, in the order in which they are registered."""

from . import (
    add_layer_norm,
    add_rms_norm,
    channel_layer_norm,
    group_norm,
    group_norm_apply,
    instance_norm,
    layer_norm,
    layer_norm_apply,
    modulated_layer_norm,
    rms_norm,
    scale_shift,
    statistics,
    std_norm,
)
from ._launch import Op

OPS: tuple[Op, ...] = (
    layer_norm.OP,
    rms_norm.OP,
    add_layer_norm.OP,
    add_rms_norm.OP,
    modulated_layer_norm.OP,
    std_norm.OP,
    channel_layer_norm.OP,
    instance_norm.OP,
    group_norm.OP,
    group_norm.SILU_OP,
    scale_shift.OP,
    statistics.OP,
    layer_norm_apply.OP,
    group_norm_apply.OP,
)
BY_NAME = {op.name: op for op in OPS}
