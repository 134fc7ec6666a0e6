"""Spack's recipe: `spack dev-build` in the root of the sources, with this folder's package in a repository of yours.

No licence has been chosen yet; where there is a file LICENSE, its license() goes below.
"""

from spack.package import *


class Dsengine(CMakePackage):
    """DeepSpeed-style training engine for C++ on LibTorch."""

    homepage = "https://dsengine.invalid"
    maintainers("dsengine")

    # Sources are those of the current folder (spack dev-build); there is no archive to fetch yet.
    version("0.1.0")

    variant("cuda", default=False, description="Build libdsengine_cuda (NCCL, kernels)")

    depends_on("cxx", type="build")
    depends_on("cmake@3.25:", type="build")
    depends_on("pkgconfig", type="build")
    depends_on("python", type=("build", "run"))
    depends_on("py-torch@2.11:2.15", type=("build", "link", "run"))
    depends_on("py-torch+cuda", when="+cuda")
    depends_on("cuda@13:", when="+cuda")
    depends_on("nccl", when="+cuda")
    depends_on("nlohmann-json@3.11:")
    depends_on("cli11@2.1:", type="build")
    depends_on("spdlog@1.10: +shared")
    depends_on("highway@1.0:")
    depends_on("liburing@2.3:")
    depends_on("xxhash", type="build")

    conflicts("platform=darwin", msg="dsengine runs on Linux only")
    conflicts("%gcc@:11", msg="dsengine needs the C++20 of GCC 12 or newer")

    def torch_root(self):
        return join_path(self.spec["py-torch"].package.module.python_platlib, "torch")

    def cmake_args(self):
        return [
            self.define("Torch_ROOT", self.torch_root()),
            self.define("DS_CUDA", "ON" if self.spec.satisfies("+cuda") else "OFF"),
            self.define("DS_BUILD_TESTS", False),
            self.define("DS_BUILD_BENCHMARKS", False),
        ]
