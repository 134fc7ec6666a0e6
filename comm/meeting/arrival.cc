#include "comm/meeting/arrival.h"

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/json/json_depth.h"
#include "core/json/json_integer.h"
#include "core/shown_text.h"

namespace ds::comm {
namespace {

using nlohmann::json;

constexpr const char* kProof = "proof";

std::string purpose_of(int rank) { return cat("arrival of rank ", rank); }

// A name from elsewhere may be none of UTF-8.
std::string dumped(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

void check_proof(json& value, int rank, const JobSecret& secret) {
  const json proof = value.value(kProof, json());
  value.erase(kProof);
  require<CommError>(proof.is_string() && secret.proves(proof.get<std::string>(), purpose_of(rank), dumped(value)),
                     "rendezvous: what stands at rank ", rank, "'s place in the store was not written by a process of ",
                     "this job: it does not prove that it has the job's secret (", kJobSecretVariable, "). Another ",
                     "process can reach the store; see who may reach its port");
}

}  // namespace

std::string text_of(const RankPlace& place) { return cat(shown_text(place.host_name), ", pid ", place.process); }

std::string arrival_text(const RankPlace& place, int rank, int world_size, const std::optional<JobSecret>& secret) {
  json value = {{"host", place.host_name},
                {"pid", place.process},
                {"domain", place.domain},
                {"address", place.address},
                {"world_size", world_size}};
  if (secret) value[kProof] = secret->proof_of(purpose_of(rank), dumped(value));
  return dumped(value);
}

RankPlace read_arrival(const std::string& text, int rank, int world_size, const std::optional<JobSecret>& secret) {
  json value = parse_shallow_json<json>(text);
  require<CommError>(value.is_object(), "rendezvous: expected a rank's place at that of rank ", rank,
                     " in the store, found \"", shown_text(text), "\"");
  if (secret) check_proof(value, rank, *secret);
  try {
    RankPlace place{value.at("host").get<std::string>(), json_integer<int64_t>(value.at("pid")),
                    value.at("domain").get<std::string>(), value.at("address").get<std::string>()};
    const auto theirs = json_integer<int64_t>(value.at("world_size"));
    require<CommError>(theirs == world_size, "rendezvous: rank ", rank, " (", lazy([&] { return text_of(place); }),
                       ") expects a world of ", theirs, " ranks, this rank one of ", world_size,
                       ". Set WORLD_SIZE to the same value everywhere");
    return place;
  } catch (const json::exception& error) {
    throw CommError(
        cat("rendezvous: what stands at rank ", rank, "'s place in the store is no rank's: ", error.what()));
  }
}

}  // namespace ds::comm
