"""Run exported decoders in onnxruntime-genai: are the tokens those of eager mode?

    python -m benchmarks.genai [NAME...]        default: all families; the rows of those named replace older ones

For each family a small model with random weights is saved as its users have it (``save_pretrained``), exported by
``export --genai``, and run by onnxruntime-genai on the CPU: one prompt of 24 tokens, and two prompts of 8 and 6 tokens
as one batch, which onnxruntime-genai pads on the right. The tokens are compared with those of transformers' own
``generate``, one prompt at a time. In a last run the file gets keys as values and values as keys, so its tokens must
differ. Needs transformers without torchvision, and onnxruntime-genai in an environment of its own, because it brings
its own onnxruntime (``make genai``). Writes ``benchmarks/results/genai.md``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).parent / "results" / "genai.md"
# Python of the environment that has onnxruntime-genai.
PYTHON = os.environ.get("GENAI_PYTHON", str(ROOT / ".venv-genai" / "bin" / "python"))
COUNT = 32
WHOLE = f"{COUNT} of {COUNT}"
LONG, SHORTER = 24, (8, 6)
# Largest number of prompts of one length to draw.
DRAWS = 20
# Seconds for one run of onnxruntime-genai.
LIMIT = 120
HEAD = [
    "family",
    "what is special",
    f"one prompt of {LONG} tokens",
    f"prompts of {SHORTER[0]} and {SHORTER[1]} tokens in a batch",
    "keys and values exchanged",
]


# ------------------------------------------------------------------ in the environment of onnxruntime-genai


def generate(folder: Path, rows: list[list[int]]) -> list[list[int]]:
    """Generate tokens in onnxruntime-genai, up to ``COUNT`` after the longest prompt.

    Args:
        rows: prompts, padded to one length.

    Returns:
        the new tokens of each prompt.
    """
    import numpy as np
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(folder))
    parameters = onnxruntime_genai.GeneratorParams(model)
    options = {"max_length": len(rows[0]) + COUNT, "batch_size": len(rows)}
    parameters.set_search_options(**options)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(np.array(rows, np.int32) if len(rows) > 1 else np.array(rows[0], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [np.asarray(generator.get_sequence(row))[len(rows[0]) :].tolist() for row in range(len(rows))]


# ------------------------------------------------------------------ in the environment of transformers


def generate_there(folder: Path, rows: list[list[int]]) -> list[list[int]] | str:
    """Generate tokens in the other environment.

    Returns:
        the new tokens of each prompt, or the error.
    """
    command = [PYTHON, "-P", __file__, "--generate", str(folder), json.dumps(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1][:160]
    return json.loads(done.stdout.splitlines()[-1])


def compare(made: list[list[int]] | str, expected: list[list[int]], eos: int) -> str:
    """Count the tokens before the first difference.

    Returns:
        for example "32 of 32, 12 of 32", one count for each prompt.
    """
    if isinstance(made, str):
        return f"does not run: {made}"
    counts = []
    for own, right in zip(made, expected, strict=True):
        # Both stop at the token that ends a text.
        wanted = right[: right.index(eos)] if eos in right else right
        equal = next((i for i, token in enumerate(wanted) if i >= len(own) or own[i] != token), len(wanted))
        counts.append(f"{equal} of {len(wanted)}")
    return ", ".join(counts)


def draw_prompts(eager: Any, eos: int) -> tuple[list[list[int]], list[list[int]]]:
    """Draw prompts after which eager mode does not end the text, so that all tokens are compared.

    Returns:
        one prompt of each length, and the tokens after each.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    prompts: list[list[int]] = []
    right: list[list[int]] = []
    for length in (LONG, *SHORTER):
        for _ in range(DRAWS):
            prompt = rng.integers(3, eager.vocabulary, length)
            tokens = eager.generate(prompt[None], np.ones((1, length), np.int64), COUNT).tokens[0].tolist()
            if eos not in tokens:
                break
        prompts.append(prompt.tolist())
        right.append(tokens)
    return prompts, right


def measured_row(name: str) -> list[str]:
    """Export one family and compare its tokens.

    Returns:
        a row of the table.
    """
    import normdeploy
    from benchmarks.generation import FAMILIES, WEIGHTS
    from benchmarks.huggingface import made
    from normdeploy.errors import NormdeployError
    from normdeploy.loading.huggingface_generation import FolderGenerator

    family, special = next(each for each in FAMILIES if each[0].name == name)
    with tempfile.TemporaryDirectory() as scratch:
        model, output = made(family, Path(scratch) / "model", spread=WEIGHTS), Path(scratch) / "genai"
        try:
            # The comparison of ``check`` is left out, because the tokens are compared here.
            normdeploy.export_genai(model, output, check=False)
        except NormdeployError as error:
            return [name, special, f"export: {' '.join(str(error).split())[:200]}", "", ""]
        settings = json.loads((output / "genai_config.json").read_text())
        eager = FolderGenerator(model, trust=False)
        eos = next(iter(settings["model"].get("eos_token_id", [])), -1)
        pad = settings["model"].get("pad_token_id", 0)
        prompts, right = draw_prompts(eager, eos)
        alone = compare(generate_there(output, prompts[:1]), right[:1], eos)
        padded = [row + [pad] * (SHORTER[0] - len(row)) for row in prompts[1:]]
        batch = compare(generate_there(output, padded), right[1:], eos)
        exchange_keys(output / "genai_config.json", settings)
        faulty = compare(generate_there(output, prompts[:1]), right[:1], eos)
    return [name, special, alone, batch, faulty]


def exchange_keys(file: Path, settings: dict[str, Any]) -> None:
    """Plant a fault: the keys of the cache are passed as values, and the values as keys."""
    names = settings["model"]["decoder"]["inputs"]
    names["past_key_names"], names["past_value_names"] = names["past_value_names"], names["past_key_names"]
    file.write_text(json.dumps(settings))


def older() -> dict[str, list[str]]:
    """Read the rows of the last table.

    Returns:
        family -> row.
    """
    lines = RESULT.read_text().splitlines() if RESULT.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return {row[0]: row for row in rows if len(row) == len(HEAD) and row != HEAD and row[0] != "---"}


def is_right(row: list[str]) -> bool:
    """Return whether one prompt gives eager's tokens."""
    return row[2] == WHOLE


def write_table(measured: dict[str, list[str]], names: list[str]) -> None:
    """Write the page of results."""
    from importlib.metadata import version

    asked = "import onnxruntime, onnxruntime_genai as g; print(g.__version__, onnxruntime.__version__)"
    genai, runtime = subprocess.run([PYTHON, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    table = [measured[name] for name in names if name in measured]
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, ["---"] * len(HEAD), *table)]
    summary = (
        f"{sum(map(is_right, table))} of {len(table)} families generate the {COUNT} tokens of eager mode after one"
        " prompt. Each cell counts the tokens before the first difference. In the last column, the cache has a planted"
        " fault, so its tokens should differ."
        " With a window or the states of convolutions, the padding of a batch can change the tokens of the shorter"
        " prompt."
    )
    if unnoticed := [row[0] for row in table if row[4] == WHOLE]:
        summary += f" The fault is not noticed for {', '.join(unnoticed)}, so equal tokens prove little there."
    versions = (
        f"onnxruntime-genai {genai} with onnxruntime {runtime} on the CPU, torch {version('torch')}, transformers"
        f" {version('transformers')}; small configs, random weights."
    )
    heading = "# Exported decoders in onnxruntime-genai\n\n" + (__doc__ or "").partition("\n\n")[0] + "\n\n"
    RESULT.write_text(f"{heading}{summary} {versions}\n\n" + "\n".join(lines) + "\n")


def main() -> int:
    """Measure the families and write the table.

    Returns:
        exit code.
    """
    if sys.argv[1:2] == ["--generate"]:
        print(json.dumps(generate(Path(sys.argv[2]), json.loads(sys.argv[3]))))
        return 0
    from benchmarks.generation import FAMILIES

    names = [family.name for family, _ in FAMILIES]
    if unknown := [name for name in sys.argv[1:] if name not in names]:
        sys.exit(f"no family {unknown[0]!r}; there are {', '.join(names)}")
    for name in sys.argv[1:] or names:
        row = measured_row(name)
        print(" | ".join(row), flush=True)
        write_table(older() | {name: row}, names)
    return 0 if all(map(is_right, older().values())) else 1


if __name__ == "__main__":
    sys.exit(main())
