#!/usr/bin/env python3
"""Writes defaults.json: what DeepSpeed 0.19.8 says when a ds_config gives nothing but a batch size.

Run with DS_ACCELERATOR=cpu in an environment that has deepspeed: python defaults.py > defaults.json
"""
import enum
import json
import sys

from deepspeed.runtime.config import DeepSpeedConfig

# Keys without a default of ours: Python objects, class paths, deprecated spellings.
LEFT_OUT = {
    "leaf_module", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory",
    "stage3_gather_fp16_weights_on_model_save", "mpu", "tp_group", "nvme_path"
}
TOP_LEVEL = {
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "dataloader_drop_last": "dataloader_drop_last",
    "gradient_clipping": "gradient_clipping",
    "prescale_gradients": "prescale_gradients",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "gradient_allreduce_op": "gradient_allreduce_op",
    "communication_data_type": "communication_data_type",
    "disable_allgather": "disable_allgather",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "dump_state": "dump_state",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "use_data_before_expert_parallelism": "use_data_before_expert_parallel_",
}


def plain(value):
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in LEFT_OUT}
    return value


def section(model):
    dump = plain(model.model_dump(by_alias=True) if hasattr(model, "model_dump") else dict(vars(model)))
    return {key: value for key, value in dump.items() if not isinstance(value, dict)}


def main():
    config = DeepSpeedConfig({"train_batch_size": 1})
    out = {"top_level": {}}
    for key, attribute in TOP_LEVEL.items():
        if not hasattr(config, attribute):
            print(f"no attribute {attribute}", file=sys.stderr)
            continue
        out["top_level"][key] = plain(getattr(config, attribute))
    out["fp16"] = section(config.float16_config)
    out["bf16"] = section(config.bfloat16_config)
    out["zero_optimization"] = section(config.zero_config)
    out["tensorboard"] = section(config.monitor_config.tensorboard)
    out["csv_monitor"] = section(config.monitor_config.csv_monitor)
    out["wandb"] = section(config.monitor_config.wandb)
    out["comet"] = section(config.monitor_config.comet)
    out["flops_profiler"] = section(config.flops_profiler_config)
    out["compile"] = section(config.compile_config)
    out["hybrid_engine"] = section(config.hybrid_engine)
    out["timers/throughput"] = section(config.timers_config)
    out["aio"] = plain(config.aio_config)
    out["pipeline"] = plain(config.pipeline)
    activations = config.activation_checkpointing_config
    out["activation_checkpointing"] = {
        key: getattr(activations, key)
        for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
                    "number_checkpoints", "synchronize_checkpoint_boundary", "profile")
    }
    json.dump(out, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
