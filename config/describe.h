// The JSON fields of every section: names, rules, aliases. Used to read a ds_config and to write a resolved one.
#pragma once

#include "config/sections_without_effect.h"
#include "core/json/json_fields.h"
#include "dsengine/config.h"

namespace ds::engine::config {

const JsonFields::Names<DType>& dtype_names();

void describe(JsonFields& json, Fp16Section& section);
void describe(JsonFields& json, Bf16Section& section);
void describe(JsonFields& json, Fp8Section& section);
void describe(JsonFields& json, TorchAutocastSection& section);
void describe(JsonFields& json, DataTypesSection& section);
void describe(JsonFields& json, GradientCompressionSection& section);
void describe(JsonFields& json, ZeroSection& section);
void describe(JsonFields& json, OptimizerSection& section);
void describe(JsonFields& json, SchedulerSection& section);
void describe(JsonFields& json, ActivationCheckpointingSection& section);
void describe(JsonFields& json, AioSection& section);
void describe(JsonFields& json, FlopsProfilerSection& section);
void describe(JsonFields& json, CommsLoggerSection& section);
void describe(JsonFields& json, FlightRecorderSection& section);
void describe(JsonFields& json, TimersSection& section);
void describe(JsonFields& json, CheckpointSection& section);
void describe(JsonFields& json, TensorboardSection& section);
void describe(JsonFields& json, MetricsSection& section);
void describe(JsonFields& json, TraceSection& section);
void describe(JsonFields& json, WandbSection& section);
void describe(JsonFields& json, CometSection& section);
void describe(JsonFields& json, PipelineSection& section);
void describe(JsonFields& json, TensorParallelSection& section);
void describe(JsonFields& json, SequenceParallelSection& section);
void describe(JsonFields& json, ExpertParallelSection& section);
void describe(JsonFields& json, DataEfficiencySection& section);
void describe(JsonFields& json, AutotuningSection& section);
void describe(JsonFields& json, CompileSection& section);
void describe(JsonFields& json, HybridEngineSection& section);
void describe(JsonFields& json, WeightQuantizationSection& section);
void describe(JsonFields& json, NebulaSection& section);
void describe(JsonFields& json, ProgressiveLayerDropSection& section);
void describe(JsonFields& json, CurriculumLearningSection& section);
// Describes schedule_config of a section.
void describe(JsonFields& json, DifficultySection& section);
void describe(JsonFields& json, ElasticitySection& section);
void describe(JsonFields& json, SparseAttentionSection& section);
void describe(JsonFields& json, EigenvalueSection& section);
void describe(JsonFields& json, CompressionTrainingSection& section);

// zero_optimization may also be true or false (the form before sections; stage 1 or 0).
void describe_zero_optimization(JsonFields& json, DsConfig& config);
// Every top-level key but the three batch sizes.
void describe_top_level(JsonFields& json, DsConfig& config);

// The names that optimizer.type may say, in canonical spelling: those of optim/optimizer_table and those that are
// refused.
const std::vector<std::string>& optimizer_types();
// The keys of optimizer.params for one type, for the list of all keys.
std::vector<std::string> optimizer_parameters(const std::string& type);
// The parameters of every schedule, for the list of all keys.
std::vector<std::string> scheduler_types();
std::vector<std::string> scheduler_parameters(const std::string& type);

}  // namespace ds::engine::config
