"""What a machine has for programs on a GPU: the GPU, by its driver; LibTorch; nvcc."""

import ctypes
import glob
import importlib.util
import os
import shutil

COMPUTE_CAPABILITY = (75, 76)  # CUdevice_attribute: major, minor


def find_gpu():
    """{name, bytes, capability} of the first GPU, or a text that says why there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver: {error}"
    if (error := driver.cuInit(0)) != 0:
        return f"the NVIDIA driver offers no GPU: cuInit returns {error}"
    count, device = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver finds no GPU"
    driver.cuDeviceGet(ctypes.byref(device), 0)
    name, size = ctypes.create_string_buffer(256), ctypes.c_size_t(0)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    parts = []
    for attribute in COMPUTE_CAPABILITY:
        value = ctypes.c_int(0)
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        parts.append(value.value)
    return {"name": name.value.decode(), "bytes": size.value, "capability": parts[0] * 10 + parts[1]}


def find_torch(root):
    """The folder with LibTorch's include/ and lib/: Torch_ROOT, that of this Python, that of scripts/setup."""
    found = importlib.util.find_spec("torch")
    candidates = [os.environ.get("Torch_ROOT", ""), os.path.dirname(found.origin) if found and found.origin else "",
                  *glob.glob(os.path.join(root, ".deps/venv/lib/python3*/site-packages/torch"))]
    for folder in candidates:
        if folder and os.path.isfile(os.path.join(folder, "lib/libtorch_cuda.so")):
            return folder
    return None


def find_nvcc(torch):
    """The folder of nvcc: on PATH, where CUDA installs itself, or in the wheel beside LibTorch."""
    found = shutil.which("nvcc")
    if found:
        return os.path.dirname(found)
    for folder in ("/usr/local/cuda/bin", os.path.join(os.path.dirname(torch), "nvidia/cu13/bin")):
        if os.access(os.path.join(folder, "nvcc"), os.X_OK):
            return folder
    return None


def available_bytes():
    """Of host memory, by the kernel and by this cgroup."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        values = dict(line.split(":") for line in file)
    free = int(values["MemAvailable"].split()[0]) * 1024
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="utf-8") as limit, \
             open("/sys/fs/cgroup/memory.current", encoding="utf-8") as used:
            return min(free, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):
        return free
