"""Run the core tests on each supported torch with each supported Python.

    python -m benchmarks.matrix                                  # every cell; `make test-matrix`
    python -m benchmarks.matrix --torch 2.15 --python 3.12       # one; both options may be given several times
    python -m benchmarks.matrix --lock                           # write the locks again, after a dependency has changed

``torch-VERSION.txt`` in this folder is a lock of everything that is installed with that torch, for every Python. The
results are in ``benchmarks/results/matrix.json`` and ``matrix.md``; cells that were not run in this call keep their
results.
"""
