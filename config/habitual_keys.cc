#include "config/parse_steps.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "core/json/json_problems.h"
#include "core/text.h"

namespace ds::engine::config {
namespace {

struct Meaning {
  std::string_view means;  // a path of the config, or what to do
  std::string_view keys;   // separated by spaces; without '_' and '-', in lower case
  bool is_path = true;
};

constexpr std::string_view kLoop = "the program's own loop decides it";

// At the top level.
constexpr Meaning kTop[] = {
    {"train_batch_size", "batchsize batch globalbatchsize trainbatch totalbatchsize bs"},
    {"train_micro_batch_size_per_gpu",
     "perdevicetrainbatchsize perdevicebatchsize microbatchsize microbatch batchsizepergpu batchsizeperrank "
     "trainmicrobatchsize mbs"},
    {"gradient_accumulation_steps",
     "gradientaccumulation gradaccumsteps gradaccum gradaccumulation gradaccumulationsteps accumulategradbatches "
     "accumulationsteps accumulatesteps accumsteps updatefreq"},
    {"optimizer.params.lr", "learningrate baselr initlr maxlr"},
    {"optimizer.params.weight_decay", "wd"},
    {"optimizer.type", "optim optimizertype optimizername"},
    {"scheduler.type", "lrscheduler lrschedulertype schedulertype lrschedule schedule"},
    {"scheduler.params.warmup_num_steps", "warmupsteps numwarmupsteps warmup warmupiters"},
    {"scheduler.params.total_num_steps", "totalsteps maxsteps numtrainingsteps trainsteps"},
    {"gradient_clipping", "maxgradnorm gradclip clipgrad clipgradnorm gradientclipval gradclipnorm clipnorm maxnorm"},
    {"zero_optimization.stage", "zerostage zero deepspeedstage"},
    {"zero_optimization.stage3_gather_16bit_weights_on_model_save", "zero3save16bitmodel"},
    {"tensorboard, csv_monitor, wandb or comet, each a section of its own", "monitorconfig monitor", false},
    {"comms_logger", "commsconfig"},
    {"zero_optimization.offload_optimizer.device", "cpuoffload offload offloadoptimizerdevice"},
    {"zero_optimization.offload_param.device", "offloadparamdevice"},
    {"\"bf16\": {\"enabled\": true} or \"fp16\": {\"enabled\": true}", "mixedprecision precision dtype torchdtype",
     false},
    {"fp16.enabled", "fp16enabled usefp16 half halfprecision"},
    {"bf16.enabled", "bf16enabled usebf16 bfloat"},
    {"torch_autocast.enabled", "autocast useamp"},
    {"fp16.loss_scale", "lossscale"},
    {"activation_checkpointing, and ds::recompute in the model", "gradientcheckpointing activationcheckpoint", false},
    {"pipeline.stages", "pipelineparallelsize pipelineparallel pipelinestages numstages ppsize pp"},
    {"tensor_parallel.autotp_size", "tensorparallelsize tpsize tp modelparallelsize"},
    {"communication_backend", "backend distbackend distributedbackend ddpbackend"},
    {"steps_per_print", "loginterval loggingsteps logevery logeverynsteps printfreq printevery"},
    {"seed", "randomseed manualseed rngseed"},
    {"wall_clock_breakdown", "wallclock profile"},
    {"tensorboard.output_path", "tensorboarddir logdir loggingdir"},
    {"--num_procs N for ds-launch; ranks are counted when they meet",
     "worldsize numgpus ngpus gpus numprocs nproc nprocpernode devices numnodes nodes", false},
    {"InitializeOptions.device in the program", "device usecuda cuda gpu", false},
    {"the paths that the program gives to save_checkpoint() and load_checkpoint()",
     "checkpointdir checkpointpath savedir savepath outputdir loaddir resume resumefrom ckptdir", false},
    {kLoop, "epochs numepochs epoch maxepochs numtrainepochs nepochs saveinterval savesteps evalinterval evalsteps",
     false},
    {"what the program gives as its data set and loader", "numworkers shuffle pinmemory dataset datapath datadir",
     false},
};

constexpr Meaning kZero[] = {
    {"zero_optimization.stage", "zerostage level zero"},
    {"zero_optimization.offload_optimizer", "offload offloadoptim optimizeroffload"},
    {"zero_optimization.offload_param", "offloadparams paramoffload parameteroffload offloadparameters"},
    {"zero_optimization.reduce_bucket_size", "bucketsize bucket"},
    {"zero_optimization.stage3_gather_16bit_weights_on_model_save", "zero3save16bitmodel gather16bitweights"},
};

constexpr Meaning kOptimizer[] = {
    {"optimizer.type", "name optim kind class optimizer"},
    {"optimizer.params.lr", "lr learningrate"},
    {"optimizer.params.weight_decay", "weightdecay wd"},
    {"optimizer.params.betas", "betas beta1 beta2"},
    {"optimizer.params.eps", "eps epsilon"},
    {"optimizer.params.momentum", "momentum"},
    {"optimizer.params", "parameters args kwargs options"},
    {"optimizer.params.adam_w_mode", "adamwmode"},
    {"optimizer.params.torch_adam", "torchadam"},
};

constexpr Meaning kOptimizerParams[] = {
    {"optimizer.params.lr", "learningrate baselr"},
    {"optimizer.params.weight_decay", "wd decay l2"},
    {"\"betas\": [beta1, beta2]", "beta1 beta2 adambeta1 adambeta2", false},
    {"optimizer.params.eps", "epsilon adamepsilon"},
};

constexpr Meaning kScheduler[] = {
    {"scheduler.type", "name kind class scheduler"},
    {"scheduler.params.warmup_num_steps", "warmupsteps warmupnumsteps numwarmupsteps warmup"},
    {"scheduler.params", "parameters args kwargs options"},
};

constexpr Meaning kSchedulerParams[] = {
    {"scheduler.params.warmup_num_steps", "warmupsteps numwarmupsteps warmup warmupiters"},
    {"scheduler.params.total_num_steps", "totalsteps maxsteps numtrainingsteps tmax"},
    {"scheduler.params.warmup_max_lr", "lr maxlr peaklr baselr learningrate"},
    {"scheduler.params.warmup_min_lr", "minlr startlr etamin"},
};

constexpr Meaning kPipeline[] = {
    {"pipeline.partition", "partitionmethod"},
    {"pipeline.stages", "pipelineparallelsize numstages pp"},
};

constexpr Meaning kHalf[] = {
    {"\"enabled\": true", "use active on enable value", false},
    {"fp16.loss_scale", "scale"},
    {"fp16.initial_scale_power", "initscale initialscale"},
    {"fp16.loss_scale_window", "growthinterval scalewindow"},
};

using Meanings = std::unordered_map<std::string, std::string>;

template <size_t N>
void add(const std::string& section, const Meaning (&rows)[N], Meanings& meanings) {
  for (const Meaning& row : rows) {
    const std::string advice = row.means == kLoop ? cat("no key of a ds_config: ", kLoop)
                               : row.is_path      ? cat("did you mean ", row.means, "?")
                                                  : cat("use ", row.means);
    for (size_t begin = 0; begin < row.keys.size();) {
      const size_t end = std::min(row.keys.find(' ', begin), row.keys.size());
      meanings.emplace(cat(section, row.keys.substr(begin, end - begin)), advice);
      begin = end + 1;
    }
  }
}

Meanings all_meanings() {
  Meanings meanings;
  add("", kTop, meanings);
  add("zero_optimization.", kZero, meanings);
  add("optimizer.", kOptimizer, meanings);
  add("optimizer.params.", kOptimizerParams, meanings);
  add("scheduler.", kScheduler, meanings);
  add("scheduler.params.", kSchedulerParams, meanings);
  add("pipeline.", kPipeline, meanings);
  add("fp16.", kHalf, meanings);
  add("bf16.", {kHalf[0]}, meanings);
  return meanings;
}

const Meanings& meanings() {
  static const Meanings kMeanings = all_meanings();
  return kMeanings;
}

}  // namespace

std::vector<std::string> habitual_keys() {
  std::vector<std::string> keys;
  for (const auto& entry : meanings()) keys.push_back(entry.first);
  return keys;
}

std::string meaning_of_key(const std::string& pointer) {
  const std::string path = dotted_path(pointer);
  const size_t dot = path.rfind('.');
  std::string key = dot == std::string::npos ? "" : path.substr(0, dot + 1);
  for (const char c : path.substr(key.size())) {
    if (c == '_' || c == '-' || c == ' ') continue;
    key += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  const auto found = meanings().find(key);
  return found == meanings().end() ? "" : found->second;
}

}  // namespace ds::engine::config
