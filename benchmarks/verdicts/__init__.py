"""Corpus of verdicts: pairs of a reference and a file that another tool made from it.

``python -m benchmarks.verdicts [--only NAME] [--count N] [--part I/N] [--update] [--no-faults] [--table]`` judges each
pair in a separate process and writes ``benchmarks/results/verdicts.json`` and ``verdicts.md``. ``--table`` writes the
results so far. Pairs in the results run again only with ``--update``. The order mixes all kinds, so that the first N
are a fair sample.

The references are modules, ``.pt2`` files and ONNX files. The files come from torch's two exporters, onnxruntime's
converters, quantizers and optimizer, onnxsim, onnxslim, onnxscript, onnxoptimizer, torchao, the exporters of
TensorFlow, JAX and PaddlePaddle, scikit-learn, LightGBM, XGBoost, and real packages. These are installed with ``pip
install --no-deps --target FOLDER onnxsim onnxslim skl2onnx scikit-learn scipy joblib threadpoolctl cloudpickle
silero-vad magika rapidocr onnxmltools onnxconverter-common lightgbm xgboost torchao onnxoptimizer``, with FOLDER in
PYTHONPATH. If one is missing, its pairs are reported as not made. Each row names the commit that judged it.
Combinations that their tool can't make are left out, and listed at the end.

Every pair is right: `normdeploy.verify` must pass it, and a failure, a refusal or a crash is a false alarm. Then six
faults are planted into the file, one at a time:

- the largest element of one weight moved by 1e-3 of its size;
- one epsilon times ten;
- one tensor scaled by batch / (the example's batch), right at the example's batch;
- a constant or a tensor in the body of an If, Loop, Scan or function moved by 1e-3;
- an axis swapped in a Transpose, reduction, Softmax or Concat;
- one weight rounded to bfloat16 or one node computed in float16.

`verify` must fail on each, and `bisect` must name the planted node or weight in the first fault that it reports.
(`bisect` begins with the comparison of `verify`, so `verify` runs again only if that comparison does not fail.)

A fault counts only if it can be observed, which `benchmarks.verdicts.observe` decides without `verify`. onnxruntime
runs the right and the faulty file on twelve random inputs. The fault must move an output by more than four times the
error that precision explains. That error is the largest of four: the right file's error against the module in float64
(or against the reference file as it runs); the change by onnxruntime's optimizer; the change when each input element
moves by one unit in the last place; half a unit in the last place of the output. Up to 24 places are tried until one is
observable. If none is, the fault is counted as not observable.
"""
