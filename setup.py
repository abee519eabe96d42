"""What pyproject.toml cannot say: a wheel brings along what a checkout has beside the package (engine/checkout.py)."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

BESIDE = ("notebooks/31_experiment.ipynb", "pyproject.toml", "LICENSE")


class BuildWithCheckout(build_py):
    def run(self):
        super().run()
        for name in () if self.editable_mode else BESIDE:
            path = Path(self.build_lib, "feddip_core", "assets", "checkout", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(name, str(path))


setup(cmdclass={"build_py": BuildWithCheckout})
