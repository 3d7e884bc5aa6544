"""Name normdeploy's pass in Olive's package config.

``olive run --package-config FILE`` reads FILE in place of Olive's own package config, so the result has the passes of
both:

    python -m normdeploy.passes.olive_packages > olive_packages.json
    olive run --config workflow.json --package-config olive_packages.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PASS = "NormdeployFuseNorms"


def olive_packages() -> dict[str, Any]:
    """Add the pass ``NormdeployFuseNorms`` to the package config of the installed Olive.

    Returns:
        a value for the argument ``package_config`` of ``olive.workflows.run``.

    Raises:
        ModuleNotFoundError: Olive is not installed.
    """
    from olive.package_config import OlivePackageConfig

    config = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text(encoding="utf-8"))
    config["passes"][PASS] = {
        "module_path": f"normdeploy.passes.olive_pass.{PASS}",
        "supported_providers": ["*"],
        "supported_accelerators": ["*"],
        "supported_precisions": ["*"],
        "supported_algorithms": [],
        "supported_quantization_encodings": [],
    }
    return config


if __name__ == "__main__":
    print(json.dumps(olive_packages(), indent=1))
