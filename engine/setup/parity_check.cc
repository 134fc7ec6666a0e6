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
  require(!impl.state.pipeline, "parity_check: expected a model that each rank can run, found a ",
          "pipeline::PipelineModule, whose batches are no losses; compare its program with ds-launch parity");
  impl.parity = std::make_unique<ParityRecord>(run, impl.state, impl.progress, impl.config);
  impl.parity->start(engine);
  const RecordedLayout layout{.data_ranks = engine.dp_world_size(),
                              .accumulation = engine.gradient_accumulation_steps()};
  for (int64_t step = 0; step < run.steps; ++step) {
    for (int64_t i = 0; i < layout.accumulation; ++i) {
      const int64_t place = place_in_step(layout, run.order, engine.communicator().rank(), i);
      engine.backward(program.loss(step * layout.accumulation * layout.data_ranks + place));
      engine.step();
    }
  }
  impl.parity.reset();
}

// Makes a run on the ranks of the job. Collective.
void run_on_ranks(ParityProgram program, const ParityRun& run) {
  program.options.config = run.config();
  const Initialized all = initialize(program.options);
  make_steps(*all.engine, program, run);
}

ParityReport report_of_first(const ParityProgram& program, const RecordFolder& folder, const ParityRun& first,
                             at::Device device) {
  ParityRun run = first;
  run.folder = folder.of_reference();
  run.like = folder.of_run();
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
  const RecordedRun layout = read_run(folder.of_run());
  const RecordedRun other_order = read_run(folder.of_other_order());
  const RecordedRun reference = read_run(folder.of_reference(), layout.layout);
  const ParityVerdict verdict = judge_parity(layout, reference, choose_bounds(layout, reference, &other_order));
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
  const auto on_all = [&](const std::string& path) { return comm::text_of_first_rank(path, device, *world); };
  run.folder = on_all(folder ? folder->of_run() : std::string());
  make_steps(*all.engine, program, run);
  all = {};
  program = {};
  ParityRun other = run;
  other.folder = on_all(folder ? folder->of_other_order() : std::string());
  other.like = run.folder;
  other.order = ParityRun::Order::kOtherSamples;
  run_on_ranks(make(), other);
  ParityReport report;
  std::exception_ptr failure;
  try {
    if (world->rank() == 0) report = report_of_first(make(), *folder, run, device);
  } catch (...) {
    failure = std::current_exception();
  }
  if (const auto failed = comm::failure_of_ranks(failure, device, *world)) {
    throw UsageError(cat("parity_check: rank ", failed->rank, ": ", failed->message));
  }
  report.text = comm::text_of_first_rank(report.text, device, *world);
  report.equal = comm::largest_of_ranks(report.equal ? 1 : 0, device, *world, "whether runs are equal") == 1;
  return report;
}

}  // namespace ds::engine
