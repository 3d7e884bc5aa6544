"""``make check`` runs the tests of what is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.changed import files_of


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("normdeploy/rewriting/activation_fusion.py", "tests/rewriting/test_activation_fusion.py"),
        ("normdeploy/proof/pointwise_forms.py", "tests/rewriting/test_activation_fusion.py"),  # which imports it
        ("tests/rewriting/test_weight_rows.py", "tests/rewriting/test_weight_rows.py"),
        ("normdeploy/verbs/package/triton_config.py", "tests/verbs/package/test_package_function.py"),
        ("normdeploy/engines/builder_client.py", "tests/engines/test_builder_client.py"),
        ("normdeploy/engines/builder_process.py", "tests/engines/test_ep_context.py"),  # those of its folder
        ("docs/reference/export.md", "tests/test_docs.py"),
        ("README.md", "tests/test_words.py"),
        ("normdeploy/errors.py", "tests/test_words.py"),
        ("docs/how-to/dynamic-batch.md", "tests/test_docs.py"),
        ("examples/cpp/run_engine.cpp", "tests/cpp/test_cpp.py"),
        ("examples/fleet/airflow/normdeploy_fleet.py", "tests/fleet/test_fleet_examples.py"),
    ],
)
def test_the_files_of_a_file(path: str, wanted: str) -> None:
    assert Path(wanted) in files_of([Path(path)])


def test_a_module_that_most_tests_import_does_not_run_them_all() -> None:
    assert len(files_of([Path("normdeploy/errors.py")])) < 12


def test_nothing_changed() -> None:
    assert files_of([]) == []
