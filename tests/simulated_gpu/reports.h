// What a program asks the library of the simulated GPU for, by name.
#pragma once

#include <cstdint>

extern "C" {

// Runs what streams have left and calls `take` with each report since the last call (timeline.h).
void ds_simulated_gpu_reports(void (*take)(const char*));
// Calls `take` with what the host has waited for since the last call, and how often (Timeline::take_waits).
void ds_simulated_gpu_waits(void (*take)(const char* what, int64_t times));
// Bytes of all devices that blocks of memory pools (core/memory/memory_pool.h) have.
int64_t ds_simulated_gpu_pool_bytes();
// How often their free memory was to go back to the device.
int64_t ds_simulated_gpu_pool_trims();
// How many reads of files straight into memory of a device there were since the last call.
int64_t ds_simulated_gpu_file_reads();
// From now on the pools have so many bytes more than now, all devices together; negative: no limit.
void ds_simulated_gpu_limit_pools(int64_t more);
}
