"""Maps the top-level folders into one import root; everything else is in pyproject.toml.

`gateway/`, `engine/`, … are the parts of the product. They are importable only as `agentkv_serve.gateway`, …:
never as bare `kernels` or `engine`, since SGLang itself imports a third-party package called `kernels`.
"""

from setuptools import find_packages, setup

PARTS = ("gateway", "engine", "kernels", "phase_tagger", "evaluation")

packages = ["agentkv_serve", *(f"agentkv_serve.{name}" for name in find_packages("agentkv_serve"))]
for part in PARTS:
    packages += [f"agentkv_serve.{part}", *(f"agentkv_serve.{part}.{name}" for name in find_packages(part))]

setup(
    packages=packages,
    package_dir={"agentkv_serve": "agentkv_serve", **{f"agentkv_serve.{part}": part for part in PARTS}},
    include_package_data=True,
)
