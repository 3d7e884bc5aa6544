"""Words of torch.onnx.export and of optimum that users try with ``export`` and ``optimize``.

The arguments are those of torch.onnx.export in torch 2.13. Words that every verb shares are in
`normdeploy.other_words`.
"""

from __future__ import annotations

from ...other_words import ArgumentWord, CommandWord

_DIMS = (
    "name the dynamic dims in inputs and give their ranges in dims, such as inputs=['x[batch,3,224,224]'],"
    " dims=['batch=1:8:64'], or pass dynamic_shapes as for torch.export"
)

EXPORT_ARGUMENTS = (
    ArgumentWord(name="dynamic_axes", harmless=(None,), refusal=_DIMS),
    ArgumentWord(
        name="dynamo",
        harmless=(True, None),
        refusal="normdeploy exports only with torch.export, the exporter that dynamo=True selects; omit it",
    ),
    ArgumentWord(
        name="do_constant_folding",
        harmless=(True, None),
        refusal="constants are always computed, because the proofs of norms need them; omit it",
    ),
    ArgumentWord(
        name="optimize",
        harmless=(True, None),
        refusal="torch's own optimizer never runs, because it deletes small epsilons, and normdeploy's cleanup always"
        " runs; omit it",
    ),
    ArgumentWord(
        name="verify",
        harmless=(True, None),
        refusal="the comparison with PyTorch at the end is check here; pass check=False to skip it",
    ),
    ArgumentWord(
        name="export_params", harmless=(True, None), refusal="a file always contains the model's weights; omit it"
    ),
    ArgumentWord(
        name="external_data",
        harmless=(False, None),
        refusal="weights go to a file of their own with external_data_name='model.onnx.data', and above 2 GB without"
        " it too",
    ),
    ArgumentWord(
        name="keep_initializers_as_inputs", harmless=(False, None), refusal="weights are never inputs here; omit it"
    ),
    ArgumentWord(name="verbose", harmless=(False, None), refusal="pass progress=print to see the stages"),
    ArgumentWord(name="report", harmless=(False, None), refusal="the result holds findings and notes; print it"),
    ArgumentWord(
        name="training", harmless=(None,), refusal="models are exported in eval mode: pass eval=True to put it there"
    ),
    ArgumentWord(
        name="custom_opsets", harmless=(None,), refusal="pass functions for your operators as custom_translation_table"
    ),
    ArgumentWord(name="atol", harmless=(None,), refusal="export compares by rounding; pass a tolerance to verify"),
    ArgumentWord(name="device", harmless=(None, "cpu"), refusal="pass provider='cuda' for files that run on a GPU"),
)
"""Arguments of ``export``."""

HALF_WORDS = (
    CommandWord(flags=("--dtype",), means=("--precision",), takes_value=True),
    CommandWord(flags=("--fp16",), means=("--precision", "fp16")),
    CommandWord(flags=("--bf16",), means=("--precision", "bf16")),
    CommandWord(flags=("--samples",), means=("--calibrate",), takes_value=True),
    CommandWord(flags=("--device",), refusal="--provider names the device that runs the written file, cpu or cuda"),
)
"""Options of ``export`` and ``optimize``."""

EXPORT_WORDS = (
    CommandWord(flags=("--opset-version", "--opset_version"), means=("--opset",), takes_value=True),
    CommandWord(
        flags=("--atol", "--rtol"),
        refusal="export compares the file with PyTorch by the rounding of both; pass --atol and --rtol to normdeploy"
        " verify, or --no-check to skip the comparison",
    ),
)
"""Further options of ``export``."""
