"""Conan's recipe: conan create packaging/conan -o "dsengine/*:torch_root=/path/to/torch" --build missing

LibTorch is the wheel's, or another folder with include/ and lib/: Conan Center's is older than the range. No licence has
been chosen yet.
"""
import os

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain
from conan.tools.files import copy
from conan.tools.gnu import PkgConfigDeps

required_conan_version = ">=2.0"


class DsengineConan(ConanFile):
    name = "dsengine"
    version = "0.1.0"
    description = "DeepSpeed-style training engine for C++ on LibTorch"
    topics = ("deep-learning", "distributed-training", "libtorch", "zero")
    package_type = "shared-library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"cuda": [True, False], "torch_root": ["ANY"]}
    default_options = {"cuda": False, "torch_root": "", "spdlog/*:shared": True}

    def requirements(self):
        self.requires("nlohmann_json/[>=3.11]", transitive_headers=True)
        self.requires("cli11/[>=2.1]")
        self.requires("spdlog/[>=1.10]")
        self.requires("highway/[>=1.0]")
        self.requires("liburing/[>=2.3]")
        self.requires("xxhash/[>=0.8]")

    def build_requirements(self):
        self.tool_requires("cmake/[>=3.25]")

    def validate(self):
        check_min_cppstd(self, 20)
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration("dsengine runs on Linux only")
        if not os.path.isdir(os.path.join(str(self.options.torch_root), "include")):
            raise ConanInvalidConfiguration(
                f"expected -o 'dsengine/*:torch_root=DIR' with LibTorch's include/ and lib/, found '{self.options.torch_root}'")

    def export_sources(self):
        root = os.path.join(self.recipe_folder, "..", "..")
        copy(self, "*", root, self.export_sources_folder, excludes=("build/*", ".deps/*", ".git/*"))

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["Torch_ROOT"] = str(self.options.torch_root)
        toolchain.cache_variables["DS_CUDA"] = "ON" if self.options.cuda else "OFF"
        toolchain.cache_variables["DS_BUILD_TESTS"] = False
        toolchain.cache_variables["DS_BUILD_EXAMPLES"] = False
        toolchain.cache_variables["DS_BUILD_BENCHMARKS"] = False
        toolchain.generate()
        CMakeDeps(self).generate()
        PkgConfigDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        # Its own dsengine-config.cmake knows LibTorch, which a generated one would not.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("lib", "cmake", "dsengine")]
        self.cpp_info.libs = ["dsengine"]
