// What a program asks the library of the simulated GPU for, by name.
#pragma once

extern "C" {

// Runs what streams have left and calls `take` with each report since the last call (timeline.h).
void ds_simulated_gpu_reports(void (*take)(const char*));
}
