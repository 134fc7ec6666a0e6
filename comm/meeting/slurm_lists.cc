#include "comm/meeting/slurm_lists.h"

#include <algorithm>

#include "comm/meeting/environment_reader.h"
#include "core/check.h"

namespace ds::comm {

std::string first_slurm_host(const std::string& list, const std::string& where) {
  std::string host;
  for (size_t at = 0; at < list.size() && list[at] != ','; ++at) {
    if (list[at] != '[') {
      host += list[at];
      continue;
    }
    const size_t close = list.find(']', at);
    const size_t first_end = list.find_first_of(",-]", at);
    require<ConfigError>(close != std::string::npos && first_end > at + 1, where,
                         ": expected names such as node[01-04,07], found '", list, "'");
    host.append(list, at + 1, first_end - at - 1);
    at = close;
  }
  require<ConfigError>(!host.empty(), where, ": expected names such as node[01-04,07], found '", list, "'");
  return host;
}

int slurm_tasks_on_node(const std::string& list, int node, const std::string& where) {
  int nodes = 0;
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string item = list.substr(begin, end - begin);  // "2" or "2(x3)"
    const size_t mark = item.find("(x");
    const bool repeated = mark != std::string::npos && item.back() == ')';
    const int tasks = parse_integer(item.substr(0, mark), where);
    nodes += repeated ? parse_integer(item.substr(mark + 2, item.size() - mark - 3), where) : 1;
    if (node < nodes) return tasks;
    begin = end + 1;
  }
  throw ConfigError(
      cat(where, ": expected the tasks of at least ", node + 1, " nodes, as in 2(x3),1, found '", list, "'"));
}

}  // namespace ds::comm
