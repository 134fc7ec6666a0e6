// Starting ranks: spawn() starts them without a launcher (torch.multiprocessing.spawn), and restart_wanted() lets
// ds-launch start them anew to take in hosts that have come back (docs/launching.md). Torch-free.
//
//   int main() {
//     ds::spawn([](int rank) { train(rank); }, 4);  // four processes; returns when all have ended well
//   }
//
// C++ has no function that another process could be given by name, and a process with LibTorch's threads must not be
// forked and used. So each process of spawn() is the program started again, with the same arguments, up to this call:
// what main() does before it is done in each of them, and the function runs there with the rank. Then the process ends,
// with the destructors of static objects; what follows the call runs in the first process alone. Earlier calls of
// spawn() are passed over there. The way to the call must not depend on anything but arguments, environment and files.
//
// The processes find in their environment what ds-launch gives its ranks: RANK, LOCAL_RANK, WORLD_SIZE,
// LOCAL_WORLD_SIZE, MASTER_ADDR (127.0.0.1), MASTER_PORT (a free one), and OMP_NUM_THREADS, the cores shared out, where
// nobody has set it. initialize() and init_distributed() need nothing else. Output is that of the program. For many
// hosts, restarts and prefixed output there is ds-launch.
#pragma once

#include <functional>

namespace ds {

// Runs function(rank), rank from 0 to processes - 1, each in a process of its own. Blocks. When one fails (throws,
// exits with another code than 0, is killed), the others get SIGTERM, 5 seconds later SIGKILL, and CommError names the
// rank, how it ended and what it has thrown; where several end at once, it names one that was killed. The processes are
// killed when this one, or the thread that called, ends. Only spawn() may wait for them: where the program takes their
// status (waitpid() for any child, a handler of SIGCHLD), that is an error too. While it runs, SIGCHLD has its default
// meaning even where the program ignores it or has set SA_NOCLDWAIT. Throws UsageError for less than one process,
// inside of a function that spawn() runs, and when a process ends without having come to the call.
void spawn(const std::function<void(int rank)>& function, int processes);

// Returns how many ranks the launcher of this process has started, from the variables that init_distributed() reads
// (ds-launch, spawn(), torchrun, srun, mpirun, jsrun), and 1 without a launcher: for what a program reads before its
// ranks meet. Throws ConfigError as init_distributed() does.
int launched_ranks();

// The exit code of a rank that asks ds-launch for a new start (EX_TEMPFAIL: try again). A job whose ranks all end with
// it has not failed: ds-launch starts it again.
//
//   engine->save_checkpoint(dir);
//   if (ds::engine::restart_wanted(*engine)) {
//     engine->wait_for_checkpoint();
//     return ds::kRestartExitCode;
//   }
inline constexpr int kRestartExitCode = 75;

}  // namespace ds

namespace ds::engine {

class Engine;

// Whether ds-launch would like a new start, with hosts that have come back. All ranks ask after a save: collective, one
// number. When it says true, call wait_for_checkpoint() and end all ranks with kRestartExitCode; the ranks that are
// started next go on from the checkpoint. False without ds-launch. Throws CommError.
bool restart_wanted(Engine& engine);

}  // namespace ds::engine
