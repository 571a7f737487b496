"""What an installed package holds, and where its documents point."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIST = """
import os
from setuptools import Distribution
distribution = Distribution()
distribution.parse_config_files()
distribution.include_package_data = False  # of a manifest or version control: a wheel must not depend on these
build = distribution.get_command_obj("build_py")
build.ensure_finalized()
for _, folder, _, names in build.data_files:
    for name in names:
        print(os.path.join(folder, name))
"""


def test_a_wheel_holds_every_file_of_the_package() -> None:
    pytest.importorskip("setuptools")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LIST], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    there = {str(p.relative_to(ROOT)) for p in (ROOT / "mpk").rglob("*")
             if p.is_file() and p.suffix not in (".py", ".pyc") and not p.name.startswith(".")}
    assert "mpk/targets/cuda/include/std/cstdint" in there
    assert there == set(done.stdout.split())


@pytest.mark.parametrize("document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_the_links_of_a_document_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8"))
    assert [t for t in targets if not (document.parent / t).exists()] == []
