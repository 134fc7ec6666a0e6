// Ranks without a launcher: torch.multiprocessing.spawn.
//
//   int main() {
//     ds::spawn([](int rank) { train(rank); }, 4);  // four processes; returns when all have ended well
//   }
//
// C++ has no function that another process could be given by name, and a process with LibTorch's threads must not be
// forked and used. So each process is the program started again, with the same arguments, up to this call: what main()
// does before it is done in each of them, and the function runs there with the rank. Then the process ends, with the
// destructors of static objects; what follows the call runs in the first process alone. Calls of spawn() before it are
// passed over. The way to the call must not depend on anything but arguments, environment and files.
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
// rank, how it ended and what it has thrown; of several that end at once, one that was killed. The processes are killed
// when this one, or the thread that called, ends. They are its own to wait for: where the program takes their status
// (waitpid() for any child, a handler of SIGCHLD), that is an error too. A SIGCHLD that is ignored, or SA_NOCLDWAIT,
// has its default meaning until it returns. Throws UsageError for less than one process, inside of a function that
// spawn() runs, and when a process ends without having come to the call.
void spawn(const std::function<void(int rank)>& function, int processes);

}  // namespace ds
