"""Norms as the world's exporters write them, and what becomes of each in this project and in other tools.

python -m benchmarks.corpus write FOLDER              # export everything (minutes)
python -m benchmarks.corpus run FOLDER                # this project
python -m benchmarks.corpus run FOLDER --tools ...    # other tools, each in a process of its own (--python: where they
are installed) python -m benchmarks.corpus table FOLDER              # results/corpus.json, results/corpus.md
"""
