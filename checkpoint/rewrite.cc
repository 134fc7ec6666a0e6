#include "checkpoint/rewrite.h"

#include <ATen/ops/empty.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <vector>

#include "checkpoint/save_job.h"
#include "checkpoint/tag_folder.h"
#include "core/check.h"

namespace ds::checkpoint {
namespace {

std::vector<PlannedPiece> share_of(const Source& source, int rank, int ranks) {
  std::vector<PlannedPiece> pieces;
  for (const auto& [path, tensor] : source.tensors()) {
    const int64_t begin = tensor.numel() * rank / ranks;
    const int64_t end = tensor.numel() * (rank + 1) / ranks;
    if (begin < end || (rank == 0 && tensor.numel() == 0)) pieces.push_back({path, tensor, begin, end - begin});
  }
  return pieces;
}

}  // namespace

void rewrite(Source& source, const std::string& folder, int ranks) {
  require(ranks > 0, "checkpoint: rewrite: expected a positive number of ranks, found ", ranks);
  std::filesystem::path path = std::filesystem::absolute(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // "tag/"
  SaveTarget target{.save = new_save(path.parent_path().string(), path.filename().string()), .ranks = ranks};
  begin_tag(target.save);
  try {
    for (target.rank = ranks - 1; target.rank >= 0; --target.rank) {
      SaveJob job(target);
      const std::vector<PlannedPiece> pieces = share_of(source, target.rank, ranks);
      job.open(pieces);
      for (size_t i = 0; i < pieces.size(); ++i) {
        const at::Tensor values = at::empty({pieces[i].length}, pieces[i].tensor.dtype);
        source.read(pieces[i].path, pieces[i].offset, values);
        job.write(i, values);
      }
      job.finish();
      if (target.rank == 0) job.publish(source.state(), source.aliases(), std::chrono::milliseconds(0));
    }
  } catch (...) {
    abandon_tag(target.save);
    throw;
  }
}

}  // namespace ds::checkpoint
