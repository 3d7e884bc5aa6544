"""Every night at two, UTC: one run of the fleet. For Airflow 3 with its standard provider.

The run's exit code 1 fails the task: a cell is wrong or failed, and the log names it. What is wrong stays wrong, so
nothing is retried; the next night goes on from the store. Exit code 3 skips the task: nothing is wrong, and a cell was
not run for want of a machine.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

FOLDER = "/srv/fleet"  # on the worker: fleet.toml and the models; the pages are written there
COMMAND = (
    "normdeploy fleet run fleet.toml --store s3://my-bucket/fleet --on ray://ray-head:10001 --wait 1800"
    " --html fleet.html --markdown fleet.md"
)

with DAG(
    dag_id="normdeploy_fleet",
    schedule="0 2 * * *",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    tags=["normdeploy"],
) as dag:
    BashOperator(
        task_id="fleet_run",
        bash_command=COMMAND,
        cwd=FOLDER,
        env={"RAY_USAGE_STATS_ENABLED": "0"},
        append_env=True,
        retries=0,
        skip_on_exit_code=3,
        execution_timeout=timedelta(hours=8),
    )
