// What comes from outside and is read by the library, each as one function of bytes. A reader takes any bytes: what is
// wrong with them is a ds::Error, anything else is a defect. Torch-free.
#pragma once

#include <array>
#include <string_view>

namespace ds::fuzz {

void read_config(std::string_view bytes);          // a ds_config file, and what check makes of it
void read_config_base64(std::string_view bytes);   // the same as it stands on a command line
void read_hosts(std::string_view bytes);           // a hostfile and, after an empty line, --include
void read_slurm(std::string_view bytes);           // SLURM's lists
void read_schedule(std::string_view bytes);        // a schedule of a pipeline, CSV
void read_flight(std::string_view bytes);          // a flight record, from a file and from memory
void read_messages(std::string_view bytes);        // what launchers of several hosts say to each other
void read_arguments(std::string_view bytes);       // ds-launch's command line, a word a line
void read_tool_arguments(std::string_view bytes);  // ds-tool's, likewise; nothing is run
void read_numbers(std::string_view bytes);         // numbers as people type them
void read_arrivals(std::string_view bytes);        // what a rank writes into the store, with and without a secret

struct Reader {
  const char* name;  // of its corpus, too
  void (*read)(std::string_view);
};
inline constexpr std::array<Reader, 11> kReaders = {{{"config", read_config},
                                                     {"config_base64", read_config_base64},
                                                     {"hosts", read_hosts},
                                                     {"slurm", read_slurm},
                                                     {"schedule", read_schedule},
                                                     {"flight", read_flight},
                                                     {"messages", read_messages},
                                                     {"arguments", read_arguments},
                                                     {"numbers", read_numbers},
                                                     {"arrivals", read_arrivals},
                                                     {"tool_arguments", read_tool_arguments}}};

}  // namespace ds::fuzz
