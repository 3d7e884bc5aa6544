"""Generate tokens with exported decoders: are they the tokens of eager mode?

    python -m benchmarks.generation [NAME...]        default: all families; the rows of those named replace older ones

For each family a small model with random weights is saved as its users have it (``save_pretrained``), exported with its
past, and checked as ``verify --generate 32`` does: one prompt, and two prompts of different lengths that are padded on
the left. The ordinary comparison of ``verify`` is measured in ``huggingface.md`` and is not repeated here. Needs
transformers, which the project's own environment lacks, and no torchvision. Writes
``benchmarks/results/generation.md``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.huggingface import Family, made

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).parent / "results" / "generation.md"
COUNT = 32
# Standard deviation of the weights' noise. With transformers' initial 0.02, most models repeat one token.
WEIGHTS = 0.2
# Seconds for one family.
LIMIT = 900
HEAD = [
    "family",
    "what is special",
    "equal tokens",
    "distinct tokens",
    "worst error / allowed",
    "smallest margin",
    "verdict",
]
TASK = "text-generation-with-past"
_BASE = {
    **{"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_GPT2 = {
    **{"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
_OPT = {**{k: v for k, v in _BASE.items() if k != "intermediate_size"}, "ffn_dim": 48, "word_embed_proj_dim": 32}
_BLOOM = {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}
_FALCON = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_NEXT = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "shared_expert_intermediate_size": 24},
}
_HYBRID = {
    **{"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8},
    **{"mamba_expand": 1, "mamba_chunk_size": 16, "head_dim": 8},
}
_NEO = {
    **{"vocab_size": 99, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48},
    **{"attention_types": [[["global", "local"], 1]], "window_size": 16, "max_position_embeddings": 128},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
_CHUNKED = {
    **{**_GROUPED, "head_dim": 8, "attention_chunk_size": 16, "intermediate_size_mlp": 48, "num_local_experts": 4},
    **{
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 2,
    },
    "num_experts_per_tok": 1,
}
_TOKENS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_STATES = {**_TOKENS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
_HEADS = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
_GRIFFIN = {
    **{**_TOKENS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1},
    **{"intermediate_size": 48, "lru_width": 32, "attention_window_size": 16},
    "block_types": ["recurrent", "recurrent", "attention"],
}
_RWKV = {
    **{"vocab_size": 99, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
    **{"context_length": 128, "bos_token_id": 1, "eos_token_id": 2},
}
# The keys of xLSTM have multiples of 64 values in all.
_XLSTM = {**_TOKENS, "hidden_size": 128, "num_hidden_layers": 2, "num_blocks": 2, "num_heads": 4, "chunk_size": 8}


def _of(name: str, **settings: Any) -> Any:
    return lambda transformers: getattr(transformers, name)(**settings)


def _family(name: str, model: str, config: str, special: str = "", **settings: Any) -> tuple[Family, str]:
    return Family(name, model, _of(config, **settings)), special


FAMILIES = (
    _family("Llama", "LlamaForCausalLM", "LlamaConfig", "grouped queries", **_GROUPED),
    _family("Qwen 2", "Qwen2ForCausalLM", "Qwen2Config", "biases", **_GROUPED),
    _family("Qwen 3", "Qwen3ForCausalLM", "Qwen3Config", "norms of queries and keys", **_GROUPED, head_dim=8),
    _family(
        "Gemma 2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        "window of 16, capped",
        **_GROUPED,
        head_dim=8,
        sliding_window=16,
    ),
    _family(
        "Gemma 3", "Gemma3ForCausalLM", "Gemma3TextConfig", "window of 16", **_GROUPED, head_dim=8, sliding_window=16
    ),
    _family("Mistral", "MistralForCausalLM", "MistralConfig", "window of 16", **_GROUPED, sliding_window=16),
    _family("Phi 3", "Phi3ForCausalLM", "Phi3Config", "joint projections", **_GROUPED),
    _family("GPT-2", "GPT2LMHeadModel", "GPT2Config", "table of positions", **_GPT2),
    _family("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", "partial rotary positions", **_BASE),
    _family("OPT", "OPTForCausalLM", "OPTConfig", "positions from the mask", **_OPT),
    _family("Bloom", "BloomForCausalLM", "BloomConfig", "ALiBi", **_BLOOM),
    _family("Falcon", "FalconForCausalLM", "FalconConfig", "parallel attention", **_FALCON),
    _family("StableLM", "StableLmForCausalLM", "StableLmConfig", "partial rotary positions", **_GROUPED),
    _family("OLMo 2", "Olmo2ForCausalLM", "Olmo2Config", "norms after layers", **_GROUPED),
    _family("Cohere", "CohereForCausalLM", "CohereConfig", "parallel, scaled logits", **_GROUPED),
    _family("Mixtral", "MixtralForCausalLM", "MixtralConfig", "mixture of experts", **_GROUPED, **_EXPERTS),
    _family("Qwen 3 MoE", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", "mixture of experts", **_GROUPED, **_QWEN_EXPERTS),
    _family(
        "LFM 2",
        "Lfm2ForCausalLM",
        "Lfm2Config",
        "states of convolutions",
        **_GROUPED,
        layer_types=["conv", "full_attention"],
    ),
    _family("Falcon-H1", "FalconH1ForCausalLM", "FalconH1Config", "states beside attention", **_GROUPED, **_HYBRID),
    _family(
        "Qwen 3 Next",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        "linear attention",
        **_GROUPED,
        **_QWEN_EXPERTS,
        **_NEXT,
    ),
    _family("GPT-Neo", "GPTNeoForCausalLM", "GPTNeoConfig", "local attention of 16", **_NEO),
    _family("Llama 4", "Llama4ForCausalLM", "Llama4TextConfig", "chunks of 16, complex rotary positions", **_CHUNKED),
    _family("Mamba", "MambaForCausalLM", "MambaConfig", "states alone", **_STATES),
    _family("Mamba 2", "Mamba2ForCausalLM", "Mamba2Config", "states alone", **_STATES, **_HEADS),
    _family("FalconMamba", "FalconMambaForCausalLM", "FalconMambaConfig", "states alone", **_STATES),
    _family("RecurrentGemma", "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", "states in layers", **_GRIFFIN),
    _family("RWKV", "RwkvForCausalLM", "RwkvConfig", "states alone, no mask", **_RWKV),
    _family("xLSTM", "xLSTMForCausalLM", "xLSTMConfig", "states alone, no mask", **_XLSTM),
)


def measured_row(name: str) -> list[str]:
    """Export one family and compare its tokens.

    Returns:
        a row of the table.
    """
    import normdeploy
    from normdeploy.errors import NormdeployError
    from normdeploy.verbs.verify.folder_generation import generate_from_folder
    from normdeploy.verbs.verify.verify_options import VerifyCall

    family, special = next(each for each in FAMILIES if each[0].name == name)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        folder = made(family, Path(scratch) / "model", spread=WEIGHTS)
        output = Path(scratch) / "model.onnx"
        stage = "export"
        try:
            normdeploy.export(folder, output=output, task=TASK)
            stage = "verify"
            call = VerifyCall(folder, [output], generate=COUNT, seeds=1, max_seconds=300)
            result = generate_from_folder(call, None, [output])
        except NormdeployError as error:
            return [name, special, "", "", "", "", f"{stage}: {' '.join(str(error).split())[:160]}"]
    rows = [row for file in result.files for row in file.rows]
    if not rows:
        return [name, special, "", "", "", "", f"run: {' '.join(result.describe_failures())[:160]}"]
    seconds = time.process_time() - start
    faults = [*result.describe_failures(), *result.describe_ties()]
    print(f"{name}: {seconds:.0f} s of processor time", *faults, *result.limits, sep="\n", flush=True)
    worst = max((row.worst for row in rows), key=lambda step: step.error / step.allowed)
    margin = min(step.margin for row in rows for step in row.steps)
    ties = sum(row.first_difference is not None for row in rows)
    if not result:
        verdict = "FAIL"
    elif ties:
        verdict = f"equal but for {ties} ties"
    else:
        verdict = "equal"
    if limits := "; ".join(result.limits):
        verdict = f"{verdict}, {limits}"
    equal = f"{sum(row.equal for row in rows)} of {COUNT * len(rows)}"
    distinct = len({step.token for row in rows for step in row.steps})
    return [name, special, equal, str(distinct), f"{worst.error:.1e} / {worst.allowed:.1e}", f"{margin:.1e}", verdict]


def measure_in_process(name: str) -> list[str]:
    """Measure one family in a process of its own, so that its memory is freed.

    Returns:
        a row of the table.
    """
    special = next(text for family, text in FAMILIES if family.name == name)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.generation", "--row", name],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            cwd=ROOT,
        )
    except subprocess.TimeoutExpired:
        return [name, special, "", "", "", "", f"no end after {LIMIT} s"]
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return [name, special, "", "", "", "", f"stopped: {last[:160]}"]
    print(*lines[:-1], sep="\n", flush=True)
    return lines[-1].split(" | ")


def older() -> dict[str, list[str]]:
    """Read the rows of the last table.

    Returns:
        family -> row.
    """
    lines = RESULT.read_text().splitlines() if RESULT.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return {row[0]: row for row in rows if len(row) == len(HEAD) and row != HEAD and row[0] != "---"}


def main() -> int:
    """Measure the families and write the table.

    Returns:
        exit code.
    """
    names = [family.name for family, _ in FAMILIES]
    if sys.argv[1:2] == ["--row"]:
        print(" | ".join(measured_row(sys.argv[2])))
        return 0
    if unknown := [name for name in sys.argv[1:] if name not in names]:
        sys.exit(f"no family {unknown[0]!r}; there are {', '.join(names)}")
    for name in sys.argv[1:] or names:
        row = measure_in_process(name)
        print(" | ".join(row), flush=True)
        write_table(older() | {name: row})
    return 0 if all(row[-1].startswith("equal") for row in older().values()) else 1


def write_table(measured: dict[str, list[str]]) -> None:
    """Write the page of results."""
    table = [measured[family.name] for family, _ in FAMILIES if family.name in measured]
    equal = sum(row[-1].startswith("equal") for row in table)
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, ["---"] * len(HEAD), *table)]
    heading = "# Generated tokens of exported decoders\n\n" + (__doc__ or "").partition("\n\n")[0] + "\n\n"
    summary = (
        f"{equal} of {len(table)} families generate the tokens of eager mode, {COUNT} after each of three prompts, in"
        " onnxruntime with its optimizer on. Two of the prompts are read together, padded on the left. Models that"
        " ignore their mask read one prompt."
    )
    versions = (
        f"torch {version('torch')}, transformers {version('transformers')}, onnxruntime-gpu"
        f" {version('onnxruntime-gpu')}; small configs, random weights."
    )
    RESULT.write_text(f"{heading}{summary} {versions}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
