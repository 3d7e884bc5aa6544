"""Publish bundles in MLflow.

Each bundle is one run of an experiment, with its files as artifacts, and a version of a registered model.
"""

from __future__ import annotations

import os
from typing import Any

from ..errors import PublishError, RuntimeUnavailable
from .published_bundle import PublishedBundle, cell_tag

# Folder of the bundle among a run's artifacts.
_FOLDER = "bundle"
# Tag of a run whose files are all uploaded.
_WHOLE = "normdeploy.whole"


class MlflowDestination:
    """Experiment of an MLflow tracking server. MLflow itself reads the credentials (MLFLOW_TRACKING_TOKEN, ...).

    Args:
        experiment: name of the experiment; "" for "normdeploy".
        secure: True to use https, False to use http.

    Raises:
        PublishError: the server can't be reached.
        RuntimeUnavailable: MLflow is not installed.
    """

    def __init__(self, host: str, experiment: str, *, secure: bool) -> None:
        # This turns off MLflow's telemetry.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        # The default, 7 retries, takes minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise RuntimeUnavailable(f"MLflow is not installed ({error}); pip install mlflow-skinny") from error
        self._address = f"http{'s' * secure}://{host}"
        self._client = MlflowClient(tracking_uri=self._address, registry_uri=self._address)
        self._experiment = self._call_server(self._experiment_id, experiment or "normdeploy")

    def push_bundle(self, bundle: PublishedBundle) -> tuple[str, bool]:
        """Publish a bundle, unless a complete run of the bundle exists already.

        Returns:
            the URL of the run, and whether the run is new.

        Raises:
            PublishError: the server can't be reached, or refuses the bundle.
        """
        return self._call_server(self._log_bundle, bundle)

    def _log_bundle(self, bundle: PublishedBundle) -> tuple[str, bool]:
        client = self._client
        labels = bundle.labels
        name = cell_tag(bundle.cell)
        wanted = {"normdeploy.cell": bundle.cell.name, "normdeploy.bundle": labels["normdeploy.bundle"], _WHOLE: "true"}
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in wanted.items())
        if found := client.search_runs([self._experiment], query, max_results=1):
            return self._run_url(found[0].info.run_id), False
        run = client.create_run(self._experiment, run_name=bundle.cell.name, tags=labels).info.run_id
        client.log_artifacts(run, str(bundle.folder), _FOLDER)
        for measure, value in bundle.cell.measures.items():
            client.log_metric(run, measure, value)
        self._register_model(name)
        client.create_model_version(name, f"runs:/{run}/{_FOLDER}", run, tags=labels, await_creation_for=0)
        client.set_tag(run, _WHOLE, "true")
        client.set_terminated(run)
        return self._run_url(run), True

    def _run_url(self, run: str) -> str:
        return f"{self._address}/#/experiments/{self._experiment}/runs/{run}"

    def _register_model(self, name: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _experiment_id(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.create_experiment(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return str(self._client.get_experiment_by_name(name).experiment_id)

    def _call_server(self, call: Any, argument: Any) -> Any:
        from mlflow.exceptions import MlflowException
        from requests import RequestException

        try:
            return call(argument)
        except (MlflowException, RequestException, OSError) as error:
            raise PublishError(
                f"can't use MLflow at {self._address!r}: {type(error).__name__}: {str(error)[:500]}; "
                "check the address (for http: mlflow+http://) and MLFLOW_TRACKING_TOKEN"
            ) from error
