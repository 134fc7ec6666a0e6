#include "checkpoint/pickle/known_callables.h"

#include <algorithm>
#include <array>

#include "core/text.h"

namespace ds::checkpoint {
namespace {

// By the whole name.
constexpr std::array kNames = std::to_array<std::string_view>({
    "_codecs.encode",
    "argparse.Namespace",
    "builtins.bool",
    "builtins.bytearray",
    "builtins.bytes",
    "builtins.complex",
    "builtins.dict",
    "builtins.float",
    "builtins.frozenset",
    "builtins.int",
    "builtins.list",
    "builtins.object",
    "builtins.range",
    "builtins.set",
    "builtins.slice",
    "builtins.str",
    "builtins.tuple",
    "collections.Counter",
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.deque",
    "copy_reg._reconstructor",
    "copyreg._reconstructor",
    "datetime.date",
    "datetime.datetime",
    "datetime.time",
    "datetime.timedelta",
    "datetime.timezone",
    "decimal.Decimal",
    "fractions.Fraction",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy.random._pickle.__bit_generator_ctor",
    "numpy.random._pickle.__generator_ctor",
    "numpy.random._pickle.__randomstate_ctor",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.PureWindowsPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.PurePosixPath",
    "pathlib._local.PureWindowsPath",
    "pathlib._local.WindowsPath",
    "torch.Size",
    "torch.Tensor",
    "torch.device",
    "torch.nn.parameter.Buffer",
    "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
    "torch.torch_version.TorchVersion",
    "uuid.UUID",
});

// By the module that they are in, and the beginning of their names.
constexpr std::array kBeginnings = std::to_array<std::string_view>({
    "__torch__.",
    "deepspeed.checkpoint.",
    "deepspeed.runtime.",
    "deepspeed.utils.",
    "torch._tensor._rebuild_",
    "torch._utils._rebuild_",
    "torch.jit._pickle.",
});

constexpr std::string_view kOldBuiltins = "__builtin__.";

}  // namespace

bool is_known_callable(std::string_view name) {
  // The names that Python 2 had, which pickles of protocol 2 have to this day.
  if (name.starts_with(kOldBuiltins)) return is_known_callable(cat("builtins.", name.substr(kOldBuiltins.size())));
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end() ||
         std::any_of(kBeginnings.begin(), kBeginnings.end(),
                     [name](std::string_view beginning) { return name.starts_with(beginning); });
}

}  // namespace ds::checkpoint
