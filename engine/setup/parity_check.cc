// engine::parity_check: both runs of `ds-launch parity` in one process.
#include <torch/nn/module.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "comm/agreement.h"
#include "comm/shared_memory/thread_group.h"
#include "core/check.h"
#include "core/parity/parity_judge.h"
#include "core/parity/recorded_run.h"
#include "dsengine/engine.h"
#include "dsengine/initialize.h"
#include "engine/engine_impl.h"

namespace ds::engine {
namespace {

// Makes the folder of both records on rank 0, which owns it; the others get null. Collective, and throws on all ranks.
std::unique_ptr<RecordFolder> make_folder(comm::Communicator& ranks, at::Device device) {
  std::unique_ptr<RecordFolder> folder;
  std::exception_ptr failure;
  try {
    if (ranks.rank() == 0) folder = std::make_unique<RecordFolder>();
  } catch (...) {
    failure = std::current_exception();
  }
  if (const auto other = comm::failure_of_ranks(failure, device, ranks)) {
    throw IoError(cat("parity_check: rank ", other->rank, ": ", other->message));
  }
  return folder;
}

// Makes the steps of one run and records them.
void make_steps(Engine& engine, const ParityProgram& program, const ParityRun& run) {
  Engine::Impl& impl = EngineAccess::impl_of(engine);
  impl.parity = std::make_unique<ParityRecord>(run, impl.state, impl.progress, impl.config, nullptr);
  impl.parity->start(engine);
  const int64_t ranks = engine.dp_world_size();
  const int64_t micro_batches = run.steps * engine.gradient_accumulation_steps();
  for (int64_t i = 0; i < micro_batches; ++i) {
    const at::Tensor loss = program.loss(i * ranks + engine.communicator().rank());
    engine.backward(loss);
    engine.step();
  }
  impl.parity.reset();
}

ParityReport report_of_first(const ParityProgram& program, const ParityRun& of_ranks, const std::string& folder,
                             at::Device device) {
  ParityRun run = of_ranks;
  run.folder = folder;
  run.like = of_ranks.folder;
  InitializeOptions options = program.options;
  options.config = run.config();
  options.distributed.reset();
  options.mesh.reset();
  options.communicator = comm::ThreadGroup(1).communicator(0);
  options.device = device.str();
  {
    const Initialized one = initialize(options);
    make_steps(*one.engine, program, run);
  }
  const RecordedRun layout = read_run(of_ranks.folder);
  const ParityVerdict verdict = judge_parity(layout, read_run(folder, layout.layout));
  return {.equal = verdict.equal, .text = verdict.text};
}

}  // namespace

ParityReport parity_check(const std::function<ParityProgram()>& make, int64_t steps) {
  require(steps > 0, "parity_check: expected at least one step, found ", steps);
  require(!ParityRun::from_environment(), "parity_check: expected a program that is started by itself, found one that ",
          "ds-launch parity has started");
  ParityProgram program = make();
  require(program.options.init == nullptr, "parity_check: .init: expected none, found a zero::Init, whose model no ",
          "single rank has");
  ParityRun run{.folder = {}, .source = program.options.config, .steps = steps};
  program.options.config = run.config();
  Initialized all = initialize(program.options);
  const std::shared_ptr<comm::Communicator> world = EngineAccess::impl_of(*all.engine).state.ranks.world;
  const at::Device device = all.engine->device();
  const std::unique_ptr<RecordFolder> folder = make_folder(*world, device);
  run.folder = comm::text_of_first_rank(folder ? folder->of_run() : std::string(), device, *world);
  make_steps(*all.engine, program, run);
  all = {};
  program = {};
  ParityReport report;
  std::exception_ptr failure;
  try {
    if (world->rank() == 0) report = report_of_first(make(), run, folder->of_reference(), device);
  } catch (...) {
    failure = std::current_exception();
  }
  if (const auto other = comm::failure_of_ranks(failure, device, *world)) {
    throw UsageError(cat("parity_check: rank ", other->rank, ": ", other->message));
  }
  report.text = comm::text_of_first_rank(report.text, device, *world);
  report.equal = comm::largest_of_ranks(report.equal ? 1 : 0, device, *world, "whether runs are equal") == 1;
  return report;
}

}  // namespace ds::engine
