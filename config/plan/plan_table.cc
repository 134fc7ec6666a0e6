// A plan as text, with the bytes that are predicted for it.
#include <algorithm>
#include <string>
#include <vector>

#include "config/plan/plan.h"
#include "core/text.h"

namespace ds::engine {
namespace {

void add_predicted_rows(const Plan& plan, std::vector<PlanRow>& rows) {
  const zero::ModelStateBytes& bytes = *plan.bytes;
  constexpr double kMebibyte = 1024.0 * 1024.0;
  const auto mebibytes = [](int64_t value) { return fixed(static_cast<double>(value) / kMebibyte, 1); };
  rows.push_back({"model state",
                  cat(mebibytes(bytes.total()), " MiB per rank: parameters ", mebibytes(bytes.parameters),
                      ", gradients ", mebibytes(bytes.gradients), ", master ", mebibytes(bytes.master), ", optimizer ",
                      mebibytes(bytes.optimizer)),
                  cat("predicted for ", plan.parameters.value_or(0), " trainable elements")});
  const zero::OffloadedBytes& beside = plan.offloaded_bytes;
  if (beside.host_total() > 0) {
    rows.push_back({"host memory",
                    cat(mebibytes(beside.host_total()), " MiB per rank: parameters ", mebibytes(beside.host.parameters),
                        ", gradients ", mebibytes(beside.host.gradients), ", master ", mebibytes(beside.host.master),
                        ", optimizer ", mebibytes(beside.host.optimizer), ", buffers ", mebibytes(beside.staging)),
                    "predicted, for what is offloaded"});
  }
  if (plan.compression_bytes > 0) {
    rows.push_back({"gradient compression",
                    cat(mebibytes(plan.compression_bytes), " MiB per rank, remembered from step to step"),
                    cat("gradient_compression.error_feedback: ", plan.compression.error_feedback ? "true" : "false")});
  }
  if (beside.file > 0) {
    rows.push_back({"files", cat(mebibytes(beside.file), " MiB per rank"), "predicted, for what is offloaded"});
  }
  const int64_t state = bytes.total() + plan.compression_bytes + plan.ema_bytes;
  const int64_t most = state + plan.step_bytes.gathered + plan.step_bytes.secondary + plan.activation_bytes;
  if (most > state) {
    rows.push_back(
        {"in a step",
         cat("about ", mebibytes(most), " MiB per rank: gathered parameters at most ",
             mebibytes(plan.step_bytes.gathered),
             plan.step_bytes.secondary > 0 ? cat(", secondary slices ", mebibytes(plan.step_bytes.secondary)) : "",
             plan.activation_bytes > 0 ? cat(", activations ", mebibytes(plan.activation_bytes)) : "", " on top"),
         plan.activation_bytes > 0 ? "predicted" : "predicted, without activations"});
  }
}

}  // namespace

std::string to_table(const Plan& plan) {
  std::vector<PlanRow> rows = plan.rows;
  if (plan.bytes) add_predicted_rows(plan, rows);
  size_t what_width = 0;
  size_t choice_width = 0;
  for (const PlanRow& row : rows) {
    what_width = std::max(what_width, row.what.size());
    choice_width = std::max(choice_width, row.choice.size());
  }
  constexpr size_t kWidestChoice = 84;  // longer ones push their reason out of the column
  choice_width = std::min(choice_width, kWidestChoice);
  std::string table;
  for (const PlanRow& row : rows) {
    const size_t gap = choice_width > row.choice.size() ? choice_width - row.choice.size() : 0;
    table += cat(table.empty() ? "" : "\n", "  ", row.what, std::string(what_width - row.what.size() + 2, ' '),
                 row.choice, std::string(gap + 2, ' '), row.reason);
  }
  return table;
}

}  // namespace ds::engine
