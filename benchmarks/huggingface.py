"""Test Hugging Face folders out of the box: exit code of ``export`` and ``verify`` with no option besides the files.

    python -m benchmarks.huggingface [NAME...]        default: all families; the rows of those named replace older ones

For each family a small model with random weights is saved as its users have it (``save_pretrained``), and the two
commands run on the folder in separate processes. Needs transformers, which the project's own environment lacks, and no
torchvision: ``make huggingface`` creates such an environment and runs this. Writes
``benchmarks/results/huggingface.md``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).parent / "results" / "huggingface.md"
# Seconds for one command.
LIMIT = 600
HEAD = ["family", "options of export", "export", "verify", "seconds", "why not"]


@dataclass(frozen=True)
class Family:
    """Class of transformers with a small config.

    Attributes:
        files: for each file, the options of ``export`` that make it; () for none.
        preprocessor: content of ``preprocessor_config.json``, if the folder has one.
    """

    name: str
    model: str
    config: Callable[[Any], Any]
    files: tuple[tuple[str, ...], ...] = ((),)
    preprocessor: dict[str, Any] = field(default_factory=dict)


def _of(name: str, **settings: Any) -> Callable[[Any], Any]:
    return lambda transformers: getattr(transformers, name)(**settings)


def _nested(name: str, **parts: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a config of configs, given as dictionaries, which all versions accept."""
    return lambda transformers: getattr(transformers, name)(
        **{k: part(transformers).to_dict() for k, part in parts.items()}
    )


_BERT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "max_position_embeddings": 64, **_SPECIAL}
_MODERN = {**_SPECIAL, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
_DECODER_FILES = ((), ("--task", "text-generation-with-past"))
_SEQ2SEQ_FILES = ((), ("--part", "encoder"), ("--part", "decoder"), ("--part", "decoder-with-past"))
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
_T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    **{"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64},
    **{"decoder_start_token_id": 2, **_SPECIAL},
}
_WHISPER = {
    **{k: v for k, v in _BART.items() if k != "max_position_embeddings"},
    **{"num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 32, "decoder_start_token_id": 1},
    **{"begin_suppress_tokens": None, "suppress_tokens": None},
}
_CLIP_TEXT = {**_LLAMA, "max_position_embeddings": 32, "projection_dim": 24}
_CLIP_TEXT.pop("num_key_value_heads")
_CLIP_VISION = {**_VIT, "projection_dim": 24}
_SAM_VISION = {
    **{
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 16,
    },
    **{"window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48, "num_pos_feats": 8},
}
_SAM_PROMPT = {"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 8}
_SAM_MASK = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mlp_dim": 32,
    "iou_head_hidden_dim": 16,
}
_ALBERT = {**_BERT, "embedding_size": 16}
_DISTIL = {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64}
_DEBERTA = {
    **_BERT,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "type_vocab_size": 0,
    "max_position_embeddings": 64,
}
_GPT2 = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WAV2VEC2 = {
    **_BERT,
    **{"conv_dim": [16, 16, 16], "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3]},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4},
}
_MOE = {**_LLAMA, "num_experts_per_tok": 2}
_QWEN3_NEXT = {
    **_MOE,
    **{"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    **{"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
}
_DETR = {
    **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 10},
}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 24], "depths": [1, 1, 1, 1], "layer_type": "basic"}
_LEVELS = {"out_features": ["stage2", "stage3", "stage4"]}
_RT_DETR = {
    **{k: v for k, v in _DETR.items() if k != "encoder_layers"},
    **{"encoder_hidden_dim": 32, "encoder_in_channels": [32, 48, 64], "feat_strides": [8, 16, 32], "encoder_layers": 1},
    **{"decoder_in_channels": [32, 32, 32], "num_denoising": 0, "num_labels": 5, "hidden_expansion": 1.0},
}
_HGNET = {
    **{"stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 32, 48], "stage_mid_channels": [8, 8, 8, 8]},
    **{"stage_out_channels": [16, 32, 48, 64], "stage_num_blocks": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]},
    **{"stage_numb_of_layers": [1, 1, 1, 1], "stage_downsample": [False, True, True, True]},
    **{"stage_light_block": [False, False, True, True], "stage_kernel_size": [3, 3, 5, 5]},
}
_DETECTED = {"do_resize": True, "size": {"height": 64, "width": 64}}
_PREPROCESSOR = {
    "do_resize": True,
    "size": {"height": 32, "width": 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

FAMILIES = (
    Family("BERT", "BertModel", _of("BertConfig", **_BERT, max_position_embeddings=64)),
    Family(
        "BERT classifier",
        "BertForSequenceClassification",
        _of("BertConfig", **_BERT, num_labels=3),
        ((), ("--task", "text-classification")),
    ),
    Family("RoBERTa", "RobertaModel", _of("RobertaConfig", **_BERT, max_position_embeddings=66)),
    Family("DistilBERT", "DistilBertModel", _of("DistilBertConfig", **_DISTIL)),
    Family("ALBERT", "AlbertModel", _of("AlbertConfig", **_ALBERT, max_position_embeddings=64)),
    Family(
        "ModernBERT",
        "ModernBertForMaskedLM",
        _of("ModernBertConfig", **_BERT, **_MODERN),
    ),
    Family("DeBERTa", "DebertaModel", _of("DebertaConfig", **_DEBERTA)),
    Family("DeBERTa v2", "DebertaV2Model", _of("DebertaV2Config", **_DEBERTA)),
    Family("GPT-2", "GPT2LMHeadModel", _of("GPT2Config", **_GPT2), _DECODER_FILES),
    Family("Llama", "LlamaForCausalLM", _of("LlamaConfig", **_LLAMA), _DECODER_FILES),
    Family("Qwen 2", "Qwen2ForCausalLM", _of("Qwen2Config", **_LLAMA), _DECODER_FILES),
    Family("Qwen 3", "Qwen3ForCausalLM", _of("Qwen3Config", **_LLAMA, head_dim=8), _DECODER_FILES),
    Family("Gemma", "GemmaForCausalLM", _of("GemmaConfig", **_LLAMA, head_dim=8), _DECODER_FILES),
    Family(
        "Gemma 2", "Gemma2ForCausalLM", _of("Gemma2Config", **_LLAMA, head_dim=8, sliding_window=16), _DECODER_FILES
    ),
    Family(
        "Gemma 3", "Gemma3ForCausalLM", _of("Gemma3TextConfig", **_LLAMA, head_dim=8, sliding_window=16), _DECODER_FILES
    ),
    Family("Mistral", "MistralForCausalLM", _of("MistralConfig", **_LLAMA, sliding_window=16), _DECODER_FILES),
    Family("T5", "T5ForConditionalGeneration", _of("T5Config", **_T5), _SEQ2SEQ_FILES),
    Family("BART", "BartForConditionalGeneration", _of("BartConfig", **_BART), _SEQ2SEQ_FILES),
    Family(
        "Whisper",
        "WhisperForConditionalGeneration",
        _of("WhisperConfig", **_WHISPER),
        _SEQ2SEQ_FILES,
        {"feature_size": 16, "nb_max_frames": 60},
    ),
    Family("ViT", "ViTForImageClassification", _of("ViTConfig", **_VIT), preprocessor=_PREPROCESSOR),
    Family("DINOv2", "Dinov2Model", _of("Dinov2Config", **_VIT)),
    Family(
        "ConvNeXt",
        "ConvNextModel",
        _of("ConvNextConfig", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], image_size=64),
    ),
    Family("CLIP text", "CLIPTextModel", _of("CLIPTextConfig", **_CLIP_TEXT)),
    Family(
        "CLIP",
        "CLIPModel",
        lambda t: t.CLIPConfig(
            text_config=t.CLIPTextConfig(**_CLIP_TEXT).to_dict(),
            vision_config=t.CLIPVisionConfig(**_CLIP_VISION).to_dict(),
            projection_dim=24,
        ),
    ),
    Family(
        "SAM",
        "SamModel",
        lambda t: t.SamConfig(
            vision_config=t.SamVisionConfig(**_SAM_VISION).to_dict(),
            prompt_encoder_config=t.SamPromptEncoderConfig(**_SAM_PROMPT).to_dict(),
            mask_decoder_config=t.SamMaskDecoderConfig(**_SAM_MASK).to_dict(),
        ),
    ),
    Family("Wav2Vec2", "Wav2Vec2ForCTC", _of("Wav2Vec2Config", **_WAV2VEC2, **_SPECIAL)),
    Family("ELECTRA", "ElectraModel", _of("ElectraConfig", **_BERT, embedding_size=16, max_position_embeddings=64)),
    Family("Phi 3", "Phi3ForCausalLM", _of("Phi3Config", **_LLAMA), _DECODER_FILES),
    Family("Swin", "SwinModel", _of("SwinConfig", **_SWIN)),
    Family("Qwen 3 Next", "Qwen3NextForCausalLM", _of("Qwen3NextConfig", **_QWEN3_NEXT)),
    Family(
        "DETR",
        "DetrForObjectDetection",
        lambda t: t.DetrConfig(backbone_config=t.ResNetConfig(**_RESNET, out_features=["stage4"]), **_DETR),
        preprocessor=_DETECTED,
    ),
    Family(
        "Conditional DETR",
        "ConditionalDetrForObjectDetection",
        lambda t: t.ConditionalDetrConfig(backbone_config=t.ResNetConfig(**_RESNET, out_features=["stage4"]), **_DETR),
        preprocessor=_DETECTED,
    ),
    Family(
        "Deformable DETR",
        "DeformableDetrForObjectDetection",
        lambda t: t.DeformableDetrConfig(
            backbone_config=t.ResNetConfig(**_RESNET, **_LEVELS),
            **{**_DETR, "num_feature_levels": 3, "encoder_n_points": 2, "decoder_n_points": 2},
        ),
        preprocessor=_DETECTED,
    ),
    Family(
        "RT-DETR v2",
        "RTDetrV2ForObjectDetection",
        lambda t: t.RTDetrV2Config(
            backbone_config=t.RTDetrResNetConfig(**{**_RESNET, **_LEVELS, "hidden_sizes": [8, 32, 48, 64]}), **_RT_DETR
        ),
        preprocessor=_DETECTED,
    ),
    Family(
        "D-FINE",
        "DFineForObjectDetection",
        lambda t: t.DFineConfig(backbone_config=t.HGNetV2Config(**_HGNET, **_LEVELS), **_RT_DETR),
        preprocessor=_DETECTED,
    ),
)


def made(family: Family, folder: Path, spread: float = 0.02) -> Path:
    """Save the family's model; its weights are the same at each call.

    Args:
        spread: standard deviation of the noise that is added to the initial weights.

    Returns:
        the folder.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, family.model)(family.config(transformers)).eval()
    with torch.no_grad():
        # The library initializes gammas to 1 and betas to 0, which would hide lost ones.
        for name, parameter in model.named_parameters():
            parameter.add_(spread * torch.randn_like(parameter))
            # The initial decay of a linear attention forgets nearly all of its state, which would hide a lost state.
            if name.endswith("A_log"):
                parameter.sub_(3)
    model.save_pretrained(folder)
    if family.preprocessor:
        (folder / "preprocessor_config.json").write_text(json.dumps(family.preprocessor))
    return folder


def command(*arguments: str | Path) -> tuple[int, str, float]:
    """Run a verb of normdeploy.

    Returns:
        exit code, the last line that gives a reason ("" for none), and seconds.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "normdeploy", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no end after {LIMIT} s", float(LIMIT)
    said = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if line.startswith(("error", "wrong", "Traceback")) or "FAIL" in line
    ]
    return done.returncode, said[0] if said and done.returncode else "", time.perf_counter() - start


def rows(family: Family) -> list[list[str]]:
    """Export and verify each file of a family.

    Returns:
        rows of the table.
    """
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = made(family, Path(scratch) / "model")
        for options in family.files:
            output = Path(scratch) / "x.onnx"
            output.unlink(missing_ok=True)
            code, why, seconds = command("export", folder, "-o", output, *options)
            checked, reason, more = command("verify", folder, output) if code == 0 else (1, "", 0.0)
            verdict = ["0" if code == 0 else str(code), "0" if checked == 0 else "not run" if code else str(checked)]
            found.append(
                [family.name, " ".join(options), *verdict, f"{seconds:.0f} + {more:.0f}", (why or reason)[:200]]
            )
            print(" | ".join(found[-1]), flush=True)
    return found


def older() -> dict[str, list[list[str]]]:
    """Read the rows of the last table.

    Returns:
        family -> rows.
    """
    found: dict[str, list[list[str]]] = {}
    for line in RESULT.read_text().splitlines() if RESULT.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == len(HEAD) and cells != HEAD and cells[0] != "---":
            found.setdefault(cells[0], []).append(cells)
    return found


def main() -> int:
    """Measure the families and write the table.

    Returns:
        exit code.
    """
    known = {f.name for f in FAMILIES}
    if unknown := [name for name in sys.argv[1:] if name not in known]:
        sys.exit(f"no family {unknown[0]!r}; there are {', '.join(sorted(known))}")
    measured = older() if sys.argv[1:] else {}
    measured |= {f.name: rows(f) for f in FAMILIES if not sys.argv[1:] or f.name in sys.argv[1:]}
    table = [row for family in FAMILIES for row in measured.get(family.name, ())]
    right = sum(row[2] == row[3] == "0" for row in table)
    plain = [row for row in table if not row[1]]
    summary = (
        f"{right} of {len(table)} files exported and verified, {sum(r[2] == r[3] == '0' for r in plain)} of"
        f" {len(plain)} without an option."
    )
    print(summary)
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, ["---"] * len(HEAD), *table)]
    heading = "# Hugging Face folders out of the box\n\n" + (__doc__ or "").partition("\n\n")[0] + "\n\n"
    versions = (
        f"torch {version('torch')}, transformers {version('transformers')}, onnxruntime-gpu"
        f" {version('onnxruntime-gpu')}"
    )
    RESULT.write_text(f"{heading}{summary} {versions}; small configs, random weights.\n\n" + "\n".join(lines) + "\n")
    return 0 if right == len(table) else 1


if __name__ == "__main__":
    sys.exit(main())
