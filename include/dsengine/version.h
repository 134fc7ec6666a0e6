// The version of dsengine that these headers belong to, for the preprocessor. Torch-free.
#pragma once

#define DSENGINE_VERSION_MAJOR 0
#define DSENGINE_VERSION_MINOR 1
#define DSENGINE_VERSION_PATCH 0
#define DSENGINE_VERSION "0.1.0"
