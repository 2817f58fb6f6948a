"""Wheels with the compiled libraries inside, where EFFICIENT_IMAGENET_LIBRARIES names them ("copy resize").

Without the variable the wheel is pure Python, and `python -m pipeline.compiled.install` compiles on the user's machine.
"""

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NAMES = os.environ.get("EFFICIENT_IMAGENET_LIBRARIES", "").split()


class BuildLibraries(build_py):
    def run(self) -> None:
        super().run()
        if NAMES and not self.editable_mode:
            sys.path.insert(0, str(Path(__file__).parent))
            from pipeline.compiled.install import bundle

            bundle(Path(self.build_lib) / "pipeline" / "compiled" / "bundled", NAMES)


class Platform(Distribution):
    def has_ext_modules(self) -> bool:
        """Makes the wheel one of its platform."""
        return bool(NAMES)


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if NAMES else (python, abi, platform)


setup(distclass=Platform, cmdclass={"build_py": BuildLibraries, "bdist_wheel": PlatformWheel})
