"""Shrink configs of transformers: a model type gives a model of less than ``MOST`` parameters with random weights.

A config is a tree of dataclasses. Every number in the tree is replaced by a rule for its name (``_RULES``), so that
names that must agree also agree afterwards: all widths become 64, all numbers of heads 4. Lists keep their length,
except the lists with one entry per layer. From these lists one layer of each kind is kept. If the model can't be
constructed from the result, gentler plans are tried (``PLANS``).

transformers must be importable. The module itself does not import transformers before it is used.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

# Maximum number of parameters of a model
MOST = 25_000_000
WIDTH, FEED_FORWARD, HEADS, KEY_VALUE_HEADS = 64, 96, 4, 2
HEAD_WIDTH = WIDTH // HEADS
VOCABULARY, POSITIONS, IMAGE, WINDOW, EXPERTS, LAYERS = 256, 128, 64, 4, 4, 2
# Widths in lists grow from stage to stage, and some are divided into 32 groups.
_DIVISOR, _MULTIPLE = 8, 32


@dataclass(frozen=True)
class Plan:
    """How much of a config is shrunk.

    Attributes:
        widths: widths, heads and feed-forward widths.
        layers: numbers of layers, and lists with one entry per layer.
        tables: vocabulary, positions, image size, experts, queries.
    """

    name: str
    widths: bool = True
    layers: bool = True
    tables: bool = True


# From the smallest to the config's default
PLANS = (
    Plan("everything"),
    Plan("all but tables", tables=False),
    Plan("all but layers", layers=False),
    Plan("layers and tables", widths=False),
    Plan("widths", layers=False, tables=False),
    Plan("layers", widths=False, tables=False),
    Plan("tables", widths=False, layers=False),
    Plan("nothing", widths=False, layers=False, tables=False),
)


@dataclass(frozen=True)
class Small:
    """A small model.

    Attributes:
        plan: name of the plan that gave the config.
    """

    config: Any
    module: nn.Module
    plan: str

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum(p.numel() for p in self.module.parameters())


def small_model(model_type: str, model_class: Callable[[Any], nn.Module] | None = None) -> Small:
    """Construct a small model with random weights.

    Args:
        model_type: key of transformers' ``CONFIG_MAPPING``, for example "bert".
        model_class: class of the model; None for the class that ``find_class`` finds.

    Returns:
        The model in eval mode.

    Raises:
        Exception: no plan gives a model of less than ``MOST`` parameters. The error is that of the first plan.
    """
    first: Exception | None = None
    for plan, config in small_configs(model_type):
        try:
            return Small(config, construct(config, model_class), plan.name)
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def small_configs(model_type: str) -> Iterator[tuple[Plan, Any]]:
    """Yield the configs that the plans give, the smallest first.

    Args:
        model_type: key of transformers' ``CONFIG_MAPPING``.

    Raises:
        Exception: the type has no default config, or no plan gives a valid config.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    default = CONFIG_MAPPING[model_type]()
    refused: list[Exception] = []
    for plan in PLANS:
        try:
            config = shrink(default, plan)
        except Exception as error:
            refused.append(error)
            continue
        yield plan, config
    if len(refused) == len(PLANS):
        raise refused[0]


def construct(config: Any, model_class: Callable[[Any], nn.Module] | None = None) -> nn.Module:
    """Construct a model from a config, after its size was counted without memory.

    Returns:
        The model in eval mode.

    Raises:
        ValueError: the model has ``MOST`` parameters or more.
    """

    def build() -> nn.Module:
        """Build the model."""
        made: nn.Module = (model_class or find_class(config))(config)
        return made

    with torch.device("meta"):
        try:
            size = sum(p.numel() for p in build().parameters())
        except (NotImplementedError, RuntimeError):
            # Some constructors read values of tensors, which a meta tensor does not have. The largest such models fit
            # into memory.
            size = 0
    if size >= MOST:
        raise ValueError(f"the model has {size:,} parameters; the most are {MOST:,}")
    module = build().eval()
    if (size := sum(p.numel() for p in module.parameters())) >= MOST:
        raise ValueError(f"the model has {size:,} parameters; the most are {MOST:,}")
    return module


def find_class(config: Any) -> Callable[[Any], nn.Module]:
    """Find the class of a config's model: the class that ``AutoModel`` uses, else the first class of the config's own
    module that takes the config. Parts of models (a text encoder) have a config but no auto class.

    Raises:
        LookupError: no class takes the config.
    """
    import transformers

    mapping = transformers.MODEL_MAPPING
    if type(config) in mapping:
        found: Any = mapping[type(config)]
        first: Callable[[Any], nn.Module] = found[0] if isinstance(found, tuple) else found
        return first
    place = type(config).__module__.replace("configuration_", "modeling_")
    try:
        module = import_module(place)
    except ImportError as error:
        raise LookupError(f"{place} can't be imported: {error}") from error
    for value in vars(module).values():
        if not isinstance(value, type) or not issubclass(value, transformers.PreTrainedModel):
            continue
        # The common base class of a module's models has no forward.
        if getattr(value, "config_class", None) is type(config) and "forward" in vars(value):
            return value
    raise LookupError(f"no class of {place} takes {type(config).__name__}")


def shrink(config: Any, plan: Plan = PLANS[0]) -> Any:
    """Shrink a config and its sub-configs.

    Returns:
        A new config of the same class.
    """
    ids = {value: VOCABULARY - 1 - i for i, value in enumerate(sorted(_large_ids(config)))}
    return _shrink(config, plan, ids)


def shrink_value(name: str, value: Any, plan: Plan) -> Any:
    """Shrink one value by the rule for its name, as for an argument of a constructor.

    Returns:
        The new value; ``value`` if no rule holds.
    """
    return _shrink_value(name, value, plan, {}, None)


# ------------------------------------------------------------------ one config of the tree


def _shrink(config: Any, plan: Plan, ids: Mapping[int, int]) -> Any:
    values = _own_values(config)
    kept = _kept_layers(values) if plan.layers else None
    # The class computes these values from others, so that old values would contradict the new ones.
    computed = {"_out_features", "_out_indices", "out_features", "out_indices", "stage_names"}
    changed = {}
    for name, value in values.items():
        if name in computed:
            continue
        changed[name] = _shrink_value(name, value, plan, ids, kept)
    if plan.widths:
        _keep_equal_heads(values, changed)
        _fit_rotary(changed)
        _fit_state_space_heads(changed)
    return type(config)(**changed)


def _keep_equal_heads(values: Mapping[str, Any], changed: dict[str, Any]) -> None:
    """Give the keys as many heads as the queries if the default config does. The code may need equal numbers."""
    keys, queries = "num_key_value_heads", "num_attention_heads"
    if isinstance(values.get(keys), int) and values[keys] == values.get(queries):
        changed[keys] = changed[queries]


def _own_values(config: Any) -> dict[str, Any]:
    """Return the values of the fields that the config's class adds to the base class."""
    from transformers import PretrainedConfig

    base = {f.name for f in dataclasses.fields(PretrainedConfig)} - {"is_encoder_decoder"}
    names = [f.name for f in dataclasses.fields(config) if f.init and f.name not in base]
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


@dataclass(frozen=True)
class _Kept:
    """Layers that stay, by their index in a list of ``count`` entries."""

    count: int
    indices: tuple[int, ...]


_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "num_encoder_layers")


def _kept_layers(values: Mapping[str, Any]) -> _Kept | None:
    """Choose the first layer of each kind. The kind is the tuple of the entries of all lists with one entry per layer.

    Returns:
        The choice; None if the config states no number of layers.
    """
    count = next((values[name] for name in _COUNTS if isinstance(values.get(name), int)), None)
    if not count:
        return None
    lists = [v for name, v in values.items() if _has_entry_per_layer(name, v, count)]
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(repr([v[i] for v in lists]), i)
    indices = sorted(kinds.values())[: 2 * LAYERS]
    for i in range(count):
        if len(indices) < LAYERS and i not in indices:
            indices.append(i)
    return _Kept(count, tuple(sorted(indices)))


def _has_entry_per_layer(name: str, value: Any, count: int) -> bool:
    if not isinstance(value, list | tuple) or len(value) != count or count <= 2:
        return False
    return bool(re.search("layer|type|pattern|theta|sliding|rope|intermediate|sparsity", name))


def _shrink_value(name: str, value: Any, plan: Plan, ids: Mapping[int, int], kept: _Kept | None) -> Any:
    if dataclasses.is_dataclass(value) and hasattr(value, "model_type"):
        return _shrink(value, plan, ids)
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if _is_id(name):
        return _map_ids(value, ids) if plan.tables else value
    if kept is not None and _has_entry_per_layer(name, value, kept.count):
        return type(value)(value[i] for i in kept.indices)
    if kept is not None and name in _COUNTS and value == kept.count:
        return len(kept.indices)
    for rule in _RULES:
        if getattr(plan, rule.part) and re.fullmatch(rule.names, name):
            return _applied(rule, value, kept)
    return value


def _applied(rule: _Rule, value: Any, kept: _Kept | None) -> Any:
    if isinstance(value, list | tuple):
        if rule.entry is not None:
            return type(value)(_applied_to_entry(rule.entry, entry) for entry in value)
        if rule.indices and value and all(isinstance(i, int) for i in value):
            last = len(kept.indices) - 1 if kept is not None else max(value)
            return type(value)([last] if max(value) > last else value)
        return value
    if isinstance(value, int | float) and rule.one is not None and value > 0:
        # Only an int can be a size, and the type of a float is kept.
        return type(value)(rule.one(value))
    return value


def _applied_to_entry(entry: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_applied_to_entry(entry, v) for v in value)
    return entry(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else value


# ------------------------------------------------------------------ ids of tokens


def _is_id(name: str) -> bool:
    return bool(
        re.search(r"token_(id|index)s?$|(^|_)(pad|bos|eos|unk|sep|cls|mask|boi|eoi|lang)_(id|index|idx)$", name)
    )


def _large_ids(config: Any) -> set[int]:
    """Collect the ids of special tokens that are beyond the small vocabulary."""
    found: set[int] = set()
    for name, value in _own_values(config).items():
        if dataclasses.is_dataclass(value) and hasattr(value, "model_type"):
            found |= _large_ids(value)
        elif _is_id(name):
            entries = value if isinstance(value, list | tuple) else [value]
            found |= {v for v in entries if isinstance(v, int) and v >= VOCABULARY // 2}
    return found


def _map_ids(value: Any, ids: Mapping[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(ids.get(v, v) for v in value)
    return ids.get(value, value) if isinstance(value, int) else value


# ------------------------------------------------------------------ rules


@dataclass(frozen=True)
class _Rule:
    """New values for names that match a pattern.

    Attributes:
        part: attribute of ``Plan`` that switches the rule.
        one: old number -> new number.
        entry: old entry of a list -> new entry; None to keep lists.
        indices: lists of layers' indices are limited to the layers that stay.
    """

    names: str
    part: str
    one: Callable[[Any], Any] | None = None
    entry: Callable[[Any], Any] | None = None
    indices: bool = False


def _at_most(limit: int) -> Callable[[Any], Any]:
    return lambda value: min(value, limit)


def _divided(value: int) -> int:
    """Divide a width; the quotients of equal widths are equal, and larger widths give larger quotients."""
    if value <= _MULTIPLE:
        return value
    return max(_MULTIPLE, round(value / _DIVISOR / _MULTIPLE) * _MULTIPLE)


def _image_size(value: int) -> int:
    """Choose a size that patches of 14 pixels divide if they divided the old size, else ``IMAGE``."""
    if value <= IMAGE:
        return value
    if value % 14 == 0 and value % 32:
        return 56
    return IMAGE


def _head_count(value: int) -> int:
    """Choose a number of heads; one head stays one head."""
    return min(value, HEADS)


# The first rule whose pattern is the whole name holds.
_RULES = (
    _Rule("first_k_dense_replace|num_dense_layers|n_dense_layers|moe_layer_start_index", "layers", _at_most(1)),
    _Rule("num_kv_shared_layers|num_nextn_predict_layers|num_mtp_layers", "layers", lambda _: 0),
    _Rule("mlp_only_layers|(full|global)_attn_(idxs|layers)", "layers", indices=True),
    _Rule(
        "(global_attn|fullatt_block|deepstack_visual|window_block)_ind(ex|ic)es|cross_attention_layers|insert_layer_id"
        "|.*_layers?_ind(ex|ic)es|global_attention_blocks|vision_feature_layer|.*layer_ids",
        "layers",
        _at_most(1),
        indices=True,
    ),
    _Rule(
        "depths|layers_per_stage|blocks_per_stage|num_block_repeats|stage_num_blocks|.*_depths",
        "layers",
        None,
        _at_most(1),
    ),
    _Rule("stage_numb_of_layers", "layers", None, _at_most(2)),
    _Rule("num_upsampling_stages|num_stages|num_query_pool_stages|num_feature_levels|num_residual_layers", "layers"),
    _Rule(
        "(.*_)?(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|num_encoder_layers|lstm_layers"
        "|num_decoder_layers|num_.*_layers|num_blocks|depth|.*_depth|decoder_num_layers|.*_blocks|num_head_blocks)",
        "layers",
        _at_most(LAYERS),
        _at_most(1),
    ),
    # heads
    _Rule("(.*_)?(num_key_value_heads|num_kv_heads|n_kv_heads|num_query_groups)", "widths", _at_most(KEY_VALUE_HEADS)),
    _Rule("linear_num_key_heads|linear_num_value_heads", "widths", _at_most(2)),
    _Rule("mamba_(n|num)_heads|num_ssm_heads", "widths", lambda _: 2 * WIDTH // HEAD_WIDTH),
    _Rule("mamba_(d_head|head_dim)|linear_.*head_dim", "widths", lambda _: HEAD_WIDTH),
    _Rule(
        "(.*_)?(num_attention_heads|num_heads|n_heads?|attention_heads|heads|num_attn_heads)(_per_stage)?",
        "widths",
        _head_count,
        _at_most(2),
    ),
    _Rule("qk_rope_head_dim|rotary_dim", "widths", lambda _: HEAD_WIDTH // 2),
    _Rule("qk_head_dim", "widths", lambda _: HEAD_WIDTH + HEAD_WIDTH // 2),
    _Rule(
        "(.*_)?(head_dim|d_kv|dim_head|d_head|head_size|kv_channels|attention_head_dim|head_width)",
        "widths",
        lambda _: HEAD_WIDTH,
    ),
    _Rule("(q|kv|o)_lora_rank|.*_rank|.*lowrank", "widths", _at_most(16)),
    # widths
    _Rule(
        "(.*_)?(intermediate_size|ffn_dim|d_ff|mlp_dim|ffn_hidden_size|inner_dim|n_inner|d_inner|feedforward_dim"
        "|dim_feedforward|linear_units|ffn_size|intermediate_dim|ff_dim|intermediate_size_mlp|feed_forward_hidden_size)",
        "widths",
        lambda value: min(value, FEED_FORWARD),
        lambda value: min(value, FEED_FORWARD),
    ),
    _Rule("num_groups|norm_num_groups|upsample_groups", "widths", _at_most(4)),
    _Rule("num_pos_feats", "widths", lambda _: WIDTH // 2),
    _Rule("(.*_)?state_size|mamba_d_state", "widths", _at_most(16)),
    _Rule(
        "(.*_)?(codebook_dim|latent_dim|num_filters|num_channels|in_channels|channels|input_dim|input_size)",
        "widths",
        None,
        _divided,
    ),
    _Rule("tdnn_dim|conv_dim|xvector_output_dim", "widths", _at_most(32), _at_most(32)),
    _Rule(
        "(.*_)?(hidden_size|hidden_dim|d_model|embed_dim|embedding_dim|n_embd|projection_dim|proj_dim|embedding_size"
        "|projection_size|emb_dim|dim|output_dim|out_dim|output_channels|hidden_channels|classifier_proj_size"
        "|pooler_output_size|feature_size|adapter_out_dim|neck_out_channels|fpn_hidden_size|codevector_dim"
        "|width|vit_dim|word_embed_proj_dim|upsample_initial_channel|stem_hidden_channels|base_channels"
        "|subsampling_conv_channels|embedding_width|q_dim|hidden_size_global|predictor_channels|units"
        "|feature_projection_dim|conv_channels|vector_quantization_hidden_dimension|output_proj_dims)",
        "widths",
        lambda value: WIDTH if value >= WIDTH // 2 else value,
        _divided,
    ),
    _Rule(
        "(.*_)?(hidden_sizes|embed_dims|out_channels|in_channels|mid_channels|dims|neck_hidden_sizes|stem_channels"
        "|backbone_channel_list|downsample_channels|embed_dim_per_stage|encoder_hidden_sizes|channels|sizes)",
        "widths",
        None,
        _divided,
    ),
    # tables
    _Rule("(.*_)?vocab_size(_per_layer_input|_nope)?|n_vocab|ngram_vocab_size_base", "tables", _at_most(VOCABULARY)),
    _Rule("(.*_)?(codebook_size|num_embeddings|num_vq_embeddings)", "tables", _at_most(32)),
    _Rule("num_position_embeddings", "tables", _at_most(16)),
    _Rule(
        "n_positions|n_ctx|(.*_)?max_(source|target)_positions|max_(sequence|seq)_len(gth)?",
        "tables",
        _at_most(POSITIONS),
    ),
    _Rule("(.*_)?max_position_embeddings|max_pos_emb|seq_len(gth)?|model_max_length", "tables", _at_most(POSITIONS)),
    _Rule(
        "(.*_)?(image_size|crop_size|pretrain_image_size|resolution|img_size|spec_size)",
        "tables",
        _image_size,
        _image_size,
    ),
    _Rule(
        "(attention_)?window_size|sliding_window(_size)?|local_attention|window",
        "tables",
        _at_most(WINDOW),
        _at_most(WINDOW),
    ),
    _Rule(
        "num_experts_per_tok|moe_topk|moe_k|num_experts_per_token|.*experts_top_k|top_k_experts", "tables", _at_most(2)
    ),
    _Rule("n_group|topk_group|num_expert_group", "tables", lambda _: 1),
    _Rule("n_shared_experts|num_shared_experts|moe_num_shared_experts", "tables", _at_most(1)),
    _Rule(
        "(.*_)?(num_experts|num_local_experts|n_routed_experts|n_experts)",
        "tables",
        _at_most(EXPERTS),
        _at_most(EXPERTS),
    ),
    _Rule(
        "num_queries|num_query_tokens|num_latents|.*n_latents|latent_query_num|num_object_queries",
        "tables",
        _at_most(16),
    ),
    _Rule("index_topk(_blocks)?", "tables", _at_most(4)),
    _Rule("(.*_)?num_frames|frames_per_clip", "tables", _at_most(4)),
    _Rule("num_code(book|vector|_group).*|n_codebooks|num_quantizers", "tables", _at_most(4)),
)


def _fit_rotary(values: dict[str, Any]) -> None:
    """Cut the parts of rotary embeddings to the new width of a head."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling")
    if not isinstance(parameters, dict):
        return
    key = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    # Kinds of layers may have parameters of their own.
    if all(isinstance(v, dict) for v in parameters.values()) and parameters:
        values[key] = {kind: _fitted(v, values) for kind, v in parameters.items()}
    else:
        values[key] = _fitted(parameters, values)


def _fitted(parameters: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    width = values.get("qk_rope_head_dim") or values.get("head_dim") or HEAD_WIDTH
    half = int(width * (parameters.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0)) // 2
    fitted = dict(parameters)
    for name, value in parameters.items():
        if not isinstance(value, list | tuple):
            continue
        if name == "mrope_section":
            fitted[name] = _sections(value, half)
        elif name in ("long_factor", "short_factor"):
            fitted[name] = list(value[:half])
    return fitted


def _fit_state_space_heads(values: dict[str, Any]) -> None:
    """Choose as many heads of a state-space model as its inner width needs."""
    if {"expand", "num_heads", "head_dim", "hidden_size"} <= values.keys():
        values["num_heads"] = int(values["expand"] * values["hidden_size"]) // values["head_dim"]


def _sections(old: Sequence[int], total: int) -> list[int]:
    """Divide ``total`` into parts in about the old proportions; every part is at least 1."""
    whole = sum(old)
    parts = [max(1, math.floor(part * total / whole)) for part in old]
    parts[0] += total - sum(parts)
    return parts
