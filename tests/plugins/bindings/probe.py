"""Whether layout.h is the layout of these bindings: every function of every interface is called once by its slot, and
Python says which one was meant.

Runs in the worker; `EXPECTED` is what the test compares with.
"""

from __future__ import annotations

from typing import Any

from . import mock

NAME, SPACE = "Probe", "probe"
OPERATIONS = ("SUM", "PROD", "MAX", "MIN", "SUB", "EQUAL", "LESS", "FLOOR_DIV", "CEIL_DIV")
_HEARD: list[Any] = []


def hear(*what: Any) -> None:
    _HEARD.append(list(what))


def _described(desc: Any) -> list[Any]:
    """The fields of a DynamicPluginTensorDesc."""
    held = desc.desc
    return [
        *([int(d) for d in dims] for dims in (held.dims, desc.min, desc.max, desc.opt)),
        int(held.type),
        int(held.format),
        held.scale,
    ]


def _classes(trt: Any) -> tuple[Any, Any]:
    class Symbol(trt.ISymExpr):
        def __init__(self, expr: Any) -> None:
            trt.ISymExpr.__init__(self)
            self.type, self.dtype, self.expr = trt.PluginArgType.INT, trt.PluginArgDataType.INT16, expr

    class Probe(trt.IPluginV3, trt.IPluginV3QuickCore, trt.IPluginV3QuickAOTBuild):
        def __init__(self) -> None:
            trt.IPluginV3.__init__(self)
            trt.IPluginV3QuickCore.__init__(self)
            trt.IPluginV3QuickAOTBuild.__init__(self)
            self.plugin_name, self.plugin_version, self.plugin_namespace = "core name", "core version", "core space"

        def get_capability_interface(self, type: Any) -> Any:
            hear("capability", int(type))
            return self

        def clone(self) -> Any:
            hear("clone")
            return Probe()

        def get_num_outputs(self) -> int:
            return 2

        def get_output_data_types(self, types: Any, ranks: Any) -> Any:
            hear("output types", [int(t) for t in types], list(ranks))
            return [trt.DataType.BF16, trt.DataType.INT64]

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> Any:
            first, second = inputs[0][0], inputs[0][1]
            hear("input sizes", first.is_constant(), second.is_constant(), second.get_constant_value())
            hear("shape inputs", len(shape_inputs))
            made = [builder.operation(getattr(trt.DimensionOperation, op), first, second) for op in OPERATIONS]
            size = builder.declare_size_tensor(3, builder.constant(4), builder.constant(5))
            hear("size tensor", size.get_constant_value(), size.is_size_tensor())
            outputs = [trt.DimsExprs(8), trt.DimsExprs(2)]
            for i, expr in enumerate(made[:8]):
                outputs[0][i] = expr
            outputs[1][0], outputs[1][1] = made[8], builder.constant(7)
            return outputs

        def configure_plugin(self, inputs: Any, outputs: Any) -> None:
            hear("configure", [_described(d) for d in inputs], [_described(d) for d in outputs])

        def get_supported_format_combinations(self, in_out: Any, inputs: int) -> Any:
            hear("formats", inputs, [_described(d) for d in in_out])
            made = []
            kinds = (trt.DataType.HALF, trt.DataType.BF16, trt.DataType.INT64)
            forms = (trt.TensorFormat.HWC8, trt.TensorFormat.CHW32, trt.TensorFormat.LINEAR)
            for kind, form in zip(kinds, forms, strict=True):
                desc = trt.PluginTensorDesc()
                desc.type, desc.format = kind, form
                made.append(desc)
            return made

        def get_aliased_input(self, output: int) -> int:
            hear("aliased", output)
            return 40 + output

        def get_valid_tactics(self) -> list[int]:
            return [3, 9, 4]

        def get_timing_cache_id(self) -> str:
            return "timing"

        def get_metadata_string(self) -> str:
            return "metadata"

        def set_tactic(self, tactic: int) -> None:
            hear("tactic", tactic)

        def get_launch_params(self, dims: Any, in_out: Any, inputs: int, params: Any, extra: Any, builder: Any) -> None:
            hear("launch", len(dims), inputs, [_described(d) for d in in_out])
            for i, name in enumerate(mock.PARAMETERS):
                setattr(params, name, Symbol(builder.constant(101 + i)))
            extra.nbSymExprs = 2
            extra[1], extra[0] = Symbol(builder.constant(202)), Symbol(dims[0][0])
            hear("extra", len(extra) if hasattr(extra, "__len__") else extra.nbSymExprs)

        def get_kernel(self, inputs: Any, outputs: Any) -> tuple[str, bytes]:
            hear("kernel", [d.scale for d in inputs], [d.scale for d in outputs])
            return "kernel name", b"kernel text"

    class Creator(trt.IPluginCreatorV3Quick):
        def __init__(self) -> None:
            trt.IPluginCreatorV3Quick.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = NAME, "1", SPACE
            self.field_names = trt.PluginFieldCollection([trt.PluginField("a"), trt.PluginField("b")])

        def create_plugin(self, name: str, space: str, fields: Any, phase: Any, request: Any) -> Any:
            hear("create", name, space, [[f.name, int(f.type), f.data.tolist()] for f in fields])
            hear("asked", int(phase), int(request))
            return Probe()

    return Creator, Probe


def run(trt: Any) -> dict[str, Any]:
    """What was heard on either side."""
    make, _ = _classes(trt)
    registry, creator = trt.get_plugin_registry(), make()
    mock.faults()
    registry.register_creator(creator, SPACE)
    registry.parent_search_enabled = False
    enabled = registry.parent_search_enabled
    found = registry.get_creator(NAME, "1", SPACE) is not None
    everything = [len(registry.all_creators)]
    if hasattr(type(registry), "all_creators_recursive"):  # from 10.10 on
        everything.append(len(registry.all_creators_recursive))
    recorder = registry.error_recorder
    loaded = registry.load_library("path")
    resource = registry.release_plugin_resource("key")
    said: dict[str, Any] = {"answers": [enabled, found, len(set(everything)) == 1, recorder, resource]}
    said["loaded"] = loaded is None
    names = mock.fields_of(NAME, SPACE)
    fields = {"a": 7, "b": 0.5}
    plugin = mock.Plugin.create(NAME, fields, {"n": 1}, SPACE)
    said |= {"fields": names, "kinds": plugin.kinds, "name": plugin.identity()}
    said["types"] = plugin.output_types(["fp16"], [2])
    plugin.output_shapes([["n", 5]])
    said["shapes"] = plugin.output_dims({"n": 13})
    plugin.mark()
    said["combinations"] = plugin.combinations()
    plugin.configure(0)
    said |= {"tactics": plugin.tactics(), "timing": plugin.timing_cache_id(), "metadata": plugin.metadata()}
    said["aliased"] = plugin.aliased(1)
    said["kernel"] = plugin.launch(9)
    said["values"] = plugin.values({"n": 21})
    plugin.clone()
    registry.deregister_creator(creator)
    said["gone"] = registry.get_creator(NAME, "1", SPACE) is None
    return said | {"registry": mock.called(), "heard": _HEARD, "faults": mock.faults()}
