"""The libraries that a build needs, collected where their Debian packages are and carried to where they are not.

A folder for each library, with usr/ below it as the package has it: found through CMake's own files, which know their
place, and through .pc files, which are told it. One folder for all would let LibTorch's sources see the fmt of spdlog
instead of their own.
"""

import glob
import json
import os
import platform
import re
import shutil
import subprocess

LIBRARIES = {
    "nlohmann_json": ["nlohmann-json3-dev"],
    "cli11": ["libcli11-dev"],
    "fmt": ["libfmt-dev"],
    "spdlog": ["libspdlog-dev"],
    "googletest": ["libgtest-dev", "libgmock-dev"],
    "benchmark": ["libbenchmark-dev"],
    "highway": ["libhwy-dev"],
    "liburing": ["liburing-dev"],
    "xxhash": ["libxxhash-dev"],
}
NOT_NEEDED = re.compile(r"/share/(doc|man|lintian)/|libhwy_(contrib|test)|libhwy-(contrib|test)|libxxhash\.")
LARGEST = 40 << 20
MANIFEST = "bundle.json"


class BundleError(Exception):
    pass


def files_of(package):
    done = subprocess.run(["dpkg", "-L", package], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise BundleError(f"{package} is not installed: run scripts/setup first")
    return [path for path in done.stdout.splitlines() if os.path.isfile(path) and not NOT_NEEDED.search(path)]


def copy(path, folder):
    """Links become what they point to: a shared library is there under each of its names."""
    target = os.path.join(folder, path.lstrip("/"))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(path, target)
    return target


def relocate(pc_file, prefix):
    """Paths of a .pc file follow from where it lies."""
    up = os.path.relpath(prefix, os.path.dirname(pc_file))
    with open(pc_file, encoding="utf-8") as file:
        text = file.read()
    text = re.sub(r"^prefix=.*$", f"prefix=${{pcfiledir}}/{up}", text, flags=re.M)
    text = re.sub(r"^(\w+)=/usr(?=/|$)", r"\1=${prefix}", text, flags=re.M)
    with open(pc_file, "w", encoding="utf-8") as file:
        file.write(text)


def add_library(folder, packages):
    for package in packages:
        for path in files_of(package):
            target = copy(path, folder)
            if target.endswith(".pc"):
                relocate(target, os.path.join(folder, "usr"))
            if path.endswith(".so"):  # the names that programs ask for belong to another package
                for name in glob.glob(f"{path}.*"):
                    copy(name, folder)


def add_pkg_config(folder):
    """pkg-config itself, with the library it needs."""
    program = os.path.realpath(shutil.which("pkg-config") or "")
    if not os.path.isfile(program):
        raise BundleError("pkg-config is not installed: run scripts/setup first")
    os.makedirs(folder, exist_ok=True)
    shutil.copyfile(program, os.path.join(folder, "pkgconf"))
    listed = subprocess.run(["ldd", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    for name, path in re.findall(r"^\s*(libpkgconf\S*) => (\S+)", listed, flags=re.M):
        shutil.copyfile(path, os.path.join(folder, name))
    with open(os.path.join(folder, "pkg-config"), "w", encoding="utf-8") as file:
        file.write('#!/bin/sh\nhere=$(dirname "$0")\nLD_LIBRARY_PATH="$here" exec "$here/pkgconf" "$@"\n')


def size_of(folder):
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)


def collect(folder):
    """Makes the bundle anew; returns its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    for library, packages in LIBRARIES.items():
        add_library(os.path.join(folder, library), packages)
    add_pkg_config(os.path.join(folder, "pkg-config"))
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
        json.dump({"machine": platform.machine(), "libraries": LIBRARIES}, file, indent=1)
    size = size_of(folder)
    if size > LARGEST:
        raise BundleError(f"{folder}: expected at most {LARGEST >> 20} MiB, found {size >> 20} MiB")
    return size


def build_settings(folder):
    """(CMake's arguments, environment) to build with the bundle and run what was built; neither where there is none."""
    manifest = os.path.join(folder, MANIFEST)
    if not os.path.isfile(manifest):
        return [], {}
    with open(manifest, encoding="utf-8") as file:
        machine = json.load(file)["machine"]
    if machine != platform.machine():
        raise BundleError(f"{folder}: expected libraries for {platform.machine()}, found {machine}: prepare it on such "
                          "a machine")
    for name in ("pkg-config", "pkgconf"):
        os.chmod(os.path.join(folder, "pkg-config", name), 0o755)
    roots = [os.path.join(folder, library, "usr") for library in LIBRARIES]
    configs = sorted({os.path.dirname(path) for root in roots
                      for path in glob.glob(f"{root}/**/*[Cc]onfig.cmake", recursive=True)})
    descriptions = sorted({os.path.dirname(path) for root in roots for path in glob.glob(f"{root}/**/*.pc", recursive=True)})
    libraries = sorted({os.path.dirname(path) for root in roots for path in glob.glob(f"{root}/**/*.so", recursive=True)})
    # Where /usr/include is searched, which is after LibTorch's: sources that only name a header expect it there.
    headers = " ".join(f"-idirafter {root}/include" for root in roots)
    return ([f"-DCMAKE_PREFIX_PATH={';'.join(configs + roots)}", f"-DCMAKE_CXX_FLAGS={headers}",
             f"-DPKG_CONFIG_EXECUTABLE={folder}/pkg-config/pkg-config", "-DCMAKE_POLICY_VERSION_MINIMUM=3.5"],
            # A program finds its libraries by its own path, but not libfmt, which only libspdlog asks for.
            {"PKG_CONFIG_PATH": ":".join(descriptions), "LD_LIBRARY_PATH": ":".join(libraries)})
