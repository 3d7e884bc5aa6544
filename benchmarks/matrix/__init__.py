"""The core tests on each supported torch with each supported Python.

    python -m benchmarks.matrix                                  # every cell; `make test-matrix`
    python -m benchmarks.matrix --torch 2.15 --python 3.12       # one; both options may be given several times
    python -m benchmarks.matrix --lock                           # write the locks anew, after a dependency has changed

``torch-VERSION.txt`` beside this file is a lock of everything that is installed with that torch, for every Python. The
results stand in ``benchmarks/results/matrix.json`` and ``matrix.md``; a cell that was not run in this call stays there
as it was.
"""
