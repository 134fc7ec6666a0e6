#include "launcher/command_line/host_list.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <ostream>
#include <system_error>
#include <utility>

#include "core/system_call.h"
#include "core/text.h"
#include "core/utf8.h"

namespace ds::launcher {
namespace {

constexpr int kMostSlots = 1 << 16;

std::vector<std::string> split(std::string_view text, std::string_view separators, bool keep_empty) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find_first_of(separators, begin), text.size());
    if (end > begin || keep_empty) parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::optional<int> number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > kMostSlots) return std::nullopt;
  return value;
}

std::vector<int> first_slots(int count) {
  std::vector<int> slots(static_cast<size_t>(count));
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

// A name that starts with a dash would be a flag of ssh.
void require_host_name(const std::string& name, const std::string& where) {
  require<ConfigError>(name.find_first_of("\"'") == std::string::npos, where, ": expected the name of a host without ",
                       "quotes, found ", name, "; remove them");
  require<ConfigError>(!name.empty() && !name.starts_with('-') && name.find('=') == std::string::npos, where,
                       ": expected the name of a host, found '", name, "'");
}

Host parse_host_line(const std::vector<std::string>& words, const std::string& where, const std::string& line) {
  constexpr std::string_view kSlots = "slots=";
  const bool shaped = words.size() == 2 && words[1].starts_with(kSlots);
  const std::optional<int> slots = shaped ? number(std::string_view(words[1]).substr(kSlots.size())) : std::nullopt;
  require<ConfigError>(slots && *slots > 0, where, ": expected 'host slots=N' with N of at least 1, found '", line,
                       "'");
  require_host_name(words[0], where);
  return {.name = words[0], .slots = first_slots(*slots)};
}

// Prints as "a, b, c".
struct Names {
  const std::vector<Host>& hosts;
};
std::ostream& operator<<(std::ostream& out, const Names& names) {
  const char* between = "";
  for (const Host& host : names.hosts) out << std::exchange(between, ", ") << host.name;
  return out;
}

bool has_host(const std::vector<Host>& hosts, const std::string& name) {
  return std::any_of(hosts.begin(), hosts.end(), [&](const Host& host) { return host.name == name; });
}

// The parts between '@', but "user@host" stays whole where a host is called so.
std::vector<std::string> parts_of_choice(const std::string& text, const std::vector<Host>& hosts) {
  std::vector<std::string> parts;
  for (const std::string& piece : split(text, "@", true)) {
    if (!parts.empty() && has_host(hosts, cat(parts.back(), '@', piece.substr(0, piece.find(':'))))) {
      parts.back() += "@" + piece;
    } else {
      parts.push_back(piece);
    }
  }
  return parts;
}

// The slots that one part names; all of the host when it names none.
Host parse_choice(const std::string& part, const std::vector<Host>& hosts, const std::string& flag) {
  const size_t colon = part.find(':');
  const std::string name = part.substr(0, colon);
  const auto host = std::find_if(hosts.begin(), hosts.end(), [&](const Host& h) { return h.name == name; });
  require<ConfigError>(host != hosts.end(), flag, ": there is no host '", name, "'; the hosts are ", Names{hosts});
  if (colon == std::string::npos) return *host;
  Host chosen{.name = name, .slots = {}};
  for (const std::string& text : split(part.substr(colon + 1), ",", true)) {
    const std::optional<int> slot = number(text);
    require<ConfigError>(slot.has_value(), flag, ": expected NAME:SLOT,SLOT with slots as numbers, found '", text,
                         "' in '", part, "'");
    require<ConfigError>(std::count(host->slots.begin(), host->slots.end(), *slot) == 1, flag, ": host '", name,
                         "' has no slot ", *slot, ", its slots are 0 to ", host->slots.size() - 1);
    if (std::count(chosen.slots.begin(), chosen.slots.end(), *slot) == 0) chosen.slots.push_back(*slot);
  }
  std::sort(chosen.slots.begin(), chosen.slots.end());
  return chosen;
}

// A host may come several times, with more of its slots each time.
void add_choice(Host found, std::vector<Host>& chosen) {
  const auto known =
      std::find_if(chosen.begin(), chosen.end(), [&](const Host& host) { return host.name == found.name; });
  if (known == chosen.end()) return chosen.push_back(std::move(found));
  for (const int slot : found.slots) {
    if (std::count(known->slots.begin(), known->slots.end(), slot) == 0) known->slots.push_back(slot);
  }
}

}  // namespace

std::vector<Host> parse_hostfile(std::string_view text, const std::string& file) {
  std::vector<Host> hosts;
  std::vector<int> lines;
  int line_number = 0;
  for (const std::string& line : split(without_byte_order_mark(text), "\n", true)) {
    ++line_number;
    const std::vector<std::string> words = split(line.substr(0, line.find('#')), " \t\r", false);
    if (words.empty()) continue;
    const std::string where = cat(file, ", line ", line_number);
    Host host = parse_host_line(words, where, line);
    for (size_t i = 0; i < hosts.size(); ++i) {
      require<ConfigError>(hosts[i].name != host.name, where, ": host '", host.name, "' is already in line ", lines[i],
                           "; name it once, with all of its slots");
    }
    hosts.push_back(std::move(host));
    lines.push_back(line_number);
  }
  require<ConfigError>(!hosts.empty(), file, ": expected lines 'host slots=N', found none");
  return hosts;
}

std::vector<Host> parse_host_list(std::string_view text, const std::string& flag) {
  std::vector<Host> hosts;
  for (const std::string& part : split(text, ",", true)) {
    const size_t colon = part.rfind(':');
    const auto slots = colon == std::string::npos ? std::nullopt : number(std::string_view(part).substr(colon + 1));
    require<ConfigError>(slots && *slots > 0, flag, ": expected HOST:SLOTS,..., with at least one slot each, found '",
                         text, "'");
    Host host{.name = part.substr(0, colon), .slots = first_slots(*slots)};
    require_host_name(host.name, flag);
    require<ConfigError>(!has_host(hosts, host.name), flag, ": host '", host.name,
                         "' comes twice; name it once, with all of its slots");
    hosts.push_back(std::move(host));
  }
  return hosts;
}

bool is_host_list(const std::string& text) {
  std::error_code none;
  return text.find(':') != std::string::npos && !std::filesystem::exists(text, none);
}

std::vector<Host> limit_ranks(std::vector<Host> hosts, int ranks, const std::string& flag) {
  require<ConfigError>(ranks <= count_slots(hosts), flag, " ", ranks, ": there are only ", count_slots(hosts),
                       " slots (", Names{hosts}, "); ask for fewer, or name more");
  int left = ranks;
  for (Host& host : hosts) {
    host.slots.resize(static_cast<size_t>(std::min(left, static_cast<int>(host.slots.size()))));
    left -= static_cast<int>(host.slots.size());
  }
  std::erase_if(hosts, [](const Host& host) { return host.slots.empty(); });
  return hosts;
}

std::vector<Host> read_hostfile(const std::string& file) {
  auto in = classic_stream<std::ifstream>(file, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  require_system<IoError>(in.good(), "--hostfile ", file, " cannot be read");
  return parse_hostfile(text, file);
}

std::vector<Host> choose_hosts(const std::vector<Host>& hosts, Choice choice, const std::string& text) {
  const std::string flag = choice == Choice::kInclude ? "--include" : "--exclude";
  std::vector<Host> chosen;
  for (const std::string& part : parts_of_choice(text, hosts)) {
    add_choice(parse_choice(part, hosts, flag), chosen);
  }
  std::vector<Host> left;
  for (const Host& host : hosts) {
    const auto named = std::find_if(chosen.begin(), chosen.end(), [&](const Host& h) { return h.name == host.name; });
    Host kept{.name = host.name, .slots = {}};
    for (int slot : host.slots) {
      const bool listed = named != chosen.end() && std::count(named->slots.begin(), named->slots.end(), slot) > 0;
      if (listed == (choice == Choice::kInclude)) kept.slots.push_back(slot);
    }
    if (!kept.slots.empty()) left.push_back(std::move(kept));
  }
  require<ConfigError>(!left.empty(), flag, " ", text, ": no slot is left on any host (", Names{hosts}, ")");
  return left;
}

std::vector<Host> limit_hosts(std::vector<Host> hosts, const std::optional<int>& nodes, const std::optional<int>& slots,
                              const std::string& slots_flag) {
  if (nodes) {
    require<ConfigError>(*nodes <= static_cast<int>(hosts.size()), "--num_nodes ", *nodes, ": there are only ",
                         hosts.size(), " hosts (", Names{hosts}, ")");
    hosts.resize(static_cast<size_t>(*nodes));
  }
  for (Host& host : hosts) {
    if (!slots) break;
    require<ConfigError>(*slots <= static_cast<int>(host.slots.size()), slots_flag, " ", *slots, ": host '", host.name,
                         "' has only ", host.slots.size(), " slots; ask for fewer, or raise slots= in the hostfile");
    host.slots.resize(static_cast<size_t>(*slots));
  }
  return hosts;
}

int count_slots(const std::vector<Host>& hosts) {
  return std::accumulate(hosts.begin(), hosts.end(), 0,
                         [](int sum, const Host& host) { return sum + static_cast<int>(host.slots.size()); });
}

}  // namespace ds::launcher
