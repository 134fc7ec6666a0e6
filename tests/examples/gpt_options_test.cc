#include <string>
#include <vector>

#include "core/check.h"
#include "examples/gpt/gpt_options.h"

namespace gpt {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

std::optional<GptOptions> parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "gpt");
  return parse_options(static_cast<int>(arguments.size()), arguments.data());
}

TEST(GptOptions, Defaults) {
  const GptOptions options = parse({"--deepspeed_config", "c.json"}).value();
  EXPECT_EQ(options.deepspeed_config, "c.json");
  EXPECT_EQ(options.data, std::nullopt);
  EXPECT_EQ(options.model.layers, 4);
  EXPECT_EQ(options.model.hidden, 128);
  EXPECT_EQ(options.model.heads, 4);
  EXPECT_EQ(options.model.seq_len, 128);
  EXPECT_EQ(options.model.vocab, 256);
  EXPECT_EQ(options.seq_len, 128);
  EXPECT_FALSE(options.model.tie_embeddings);
  EXPECT_FALSE(options.model.tanh_gelu);
  EXPECT_EQ(options.save_checkpoint, std::nullopt);
  EXPECT_EQ(options.save_interval, 0);
  EXPECT_EQ(options.keep_checkpoints, std::nullopt);
  EXPECT_EQ(options.load_checkpoint, std::nullopt);
  EXPECT_EQ(options.load_hf, std::nullopt);
  EXPECT_EQ(options.export_hf, std::nullopt);
  EXPECT_FALSE(options.model.freeze_embeddings);
  EXPECT_FALSE(options.model.activation_checkpointing);
  EXPECT_EQ(options.order, Order::kRandom);
  EXPECT_EQ(options.seed, 1234U);
  EXPECT_EQ(options.device, "");
}

TEST(GptOptions, FillWhatTheConfigLeavesOpen) {
  const GptOptions options = parse({"--deepspeed_config", "c.json", "--micro_batch", "3", "--lr=2e-4", "--bf16", "true",
                                    "--steps", "70", "--hidden", "64"})
                                 .value();
  EXPECT_EQ(options.auto_values.train_micro_batch_size_per_gpu, 3);
  EXPECT_EQ(options.auto_values.lr, 2e-4);
  EXPECT_EQ(options.auto_values.bf16, true);
  EXPECT_EQ(options.auto_values.fp16, std::nullopt);
  EXPECT_EQ(options.auto_values.total_num_steps, 70);
  EXPECT_EQ(options.auto_values.hidden_size, 64);
}

TEST(GptOptions, EveryFlag) {
  const GptOptions options = parse({"--deepspeed_config=c.json",
                                    "--data",
                                    "d",
                                    "--layers",
                                    "2",
                                    "--hidden",
                                    "64",
                                    "--heads",
                                    "8",
                                    "--seq_len",
                                    "32",
                                    "--vocab",
                                    "300",
                                    "--tie_embeddings",
                                    "--tanh_gelu",
                                    "--freeze_embeddings",
                                    "--activation_checkpointing",
                                    "--steps",
                                    "7",
                                    "--init",
                                    "i",
                                    "--save",
                                    "s",
                                    "--export_hf",
                                    "e",
                                    "--save_checkpoint",
                                    "c",
                                    "--save_interval",
                                    "5",
                                    "--keep_checkpoints",
                                    "2",
                                    "--load_checkpoint",
                                    "l",
                                    "--order",
                                    "sequential",
                                    "--metrics",
                                    "m",
                                    "--generate",
                                    "0",
                                    "--seed",
                                    "9",
                                    "--device",
                                    "cpu"})
                                 .value();
  EXPECT_EQ(options.data, "d");
  EXPECT_EQ(options.model.layers, 2);
  EXPECT_EQ(options.model.hidden, 64);
  EXPECT_EQ(options.model.heads, 8);
  EXPECT_EQ(options.model.seq_len, 32);
  EXPECT_EQ(options.seq_len, 32);
  EXPECT_EQ(options.model.vocab, 300);
  EXPECT_TRUE(options.model.tie_embeddings);
  EXPECT_TRUE(options.model.tanh_gelu);
  EXPECT_TRUE(options.model.freeze_embeddings);
  EXPECT_TRUE(options.model.activation_checkpointing);
  EXPECT_EQ(options.steps, 7);
  EXPECT_EQ(options.init, "i");
  EXPECT_EQ(options.save, "s");
  EXPECT_EQ(options.export_hf, "e");
  EXPECT_EQ(options.save_checkpoint, "c");
  EXPECT_EQ(options.save_interval, 5);
  EXPECT_EQ(options.keep_checkpoints, 2);
  EXPECT_EQ(options.load_checkpoint, "l");
  EXPECT_EQ(options.order, Order::kSequential);
  EXPECT_EQ(options.metrics, "m");
  EXPECT_EQ(options.generate, 0);
  EXPECT_EQ(options.seed, 9U);
  EXPECT_EQ(options.device, "cpu");
}

TEST(GptOptions, WhatDeepSpeedsLauncherPassesIsTaken) {
  EXPECT_TRUE(parse({"--local_rank=1", "--deepspeed", "--deepspeed_config", "c.json"}).has_value());
  EXPECT_TRUE(parse({"--local_rank", "1", "--deepspeed_config", "c.json"}).has_value());
}

TEST(GptOptions, HelpPrintsTheFlags) {
  testing::internal::CaptureStdout();
  EXPECT_EQ(parse({"--help"}), std::nullopt);
  const std::string help = testing::internal::GetCapturedStdout();
  EXPECT_THAT(help, HasSubstr("--deepspeed_config"));
  EXPECT_THAT(help, HasSubstr("random|sequential"));
}

TEST(GptOptions, WrongArgumentsAreNamed) {
  EXPECT_THAT([] { parse({}); }, ThrowsMessage<ds::ConfigError>(HasSubstr("--deepspeed_config")));
  EXPECT_THAT(
      [] {
        parse({"--deepspeed_config", "c", "--stepz", "3"});
      },
      ThrowsMessage<ds::ConfigError>(HasSubstr("--stepz")));
  EXPECT_THAT(
      [] {
        parse({"--deepspeed_config", "c", "--steps", "-3"});
      },
      ThrowsMessage<ds::ConfigError>(HasSubstr("--steps")));
  EXPECT_THAT(
      [] {
        parse({"--deepspeed_config", "c", "--heads", "four"});
      },
      ThrowsMessage<ds::ConfigError>(HasSubstr("--heads")));
  EXPECT_THAT(
      [] {
        parse({"--deepspeed_config", "c", "--order", "sorted"});
      },
      ThrowsMessage<ds::ConfigError>(HasSubstr("sorted")));
  EXPECT_THAT(
      [] {
        parse({"--deepspeed_config", "c", "--save_interval", "5"});
      },
      ThrowsMessage<ds::ConfigError>(HasSubstr("--save_checkpoint")));
  EXPECT_THAT(
      [] {
        parse({"--deepspeed_config", "c", "--device", "tpu"});
      },
      ThrowsMessage<ds::ConfigError>(HasSubstr("--device")));
}

}  // namespace
}  // namespace gpt
