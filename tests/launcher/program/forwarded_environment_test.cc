#include "launcher/program/forwarded_environment.h"

#include <gmock/gmock.h>

#include "core/check.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thrown.h"

namespace ds::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(ForwardedEnvironment, IsThatOfCommunicationAndThreads) {
  for (const char* name :
       {"NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "UCX_TLS", "FI_PROVIDER", "MLFLOW_TRACKING_URI", "OMP_NUM_THREADS",
        "DS_LOG_LEVEL", "TORCHELASTIC_MAX_RESTARTS", "PATH", "LD_LIBRARY_PATH", "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUBLAS_WORKSPACE_CONFIG", "TORCH_NCCL_AVOID_RECORD_STREAMS", "PYTORCH_ALLOC_CONF"}) {
    EXPECT_TRUE(is_forwarded(name)) << name;
  }
  for (const char* name : {"CUDA_VISIBLE_DEVICES", "DS_LAUNCH_ID", "DS_RESTART_FILE", "DS_ENV_FILE", "HOME", "RANK",
                           "LD_PRELOAD", "SSH_AUTH_SOCK", "PATHS"}) {
    EXPECT_FALSE(is_forwarded(name)) << name;
  }
}

TEST(ForwardedEnvironment, ReadsFilesOfEntries) {
  EXPECT_THAT(parse_environment_file("# note\nA=1=2\r\n\nB_2= x \nC=\n", "file"),
              ElementsAre("A=1=2", "B_2= x ", "C="));
  EXPECT_THAT(test::thrown_by<Error>([] { parse_environment_file("A=1\nexport B=2\n", "file"); }),
              HasSubstr("file, line 2: expected NAME=value, found 'export B=2'"));
  EXPECT_THAT(test::thrown_by<Error>([] { parse_environment_file("A\n", "file"); }), HasSubstr("file, line 1"));
}

TEST(ForwardedEnvironment, ReadsWhatEditorsWrite) {
  EXPECT_THAT(parse_environment_file("\xEF\xBB\xBF"
                                     "A=1\r\nB=2\r\n",
                                     "file"),
              ElementsAre("A=1", "B=2"));
  EXPECT_THAT(parse_environment_file("A=\"x y\"\nB='1'\nC=\"\"\nD=\"a\" \"b\"\nE=it's\nF=\"\n", "file"),
              ElementsAre("A=x y", "B=1", "C=", "D=\"a\" \"b\"", "E=it's", "F=\""));
}

TEST(ForwardedEnvironment, TakesTheFilesOfHomeAndHere) {
  test::ScratchFolder home, here;
  home.write(".deepspeed_env", "A=home\n");
  here.write(".deepspeed_env", "A=here\n");
  here.write("mine", "B=mine\n");
  const std::vector<std::string> environment = {"NCCL_DEBUG=INFO", "USER=me"};
  EXPECT_THAT(forwarded_environment(environment, home.path(), here.path()),
              ElementsAre("NCCL_DEBUG=INFO", "A=home", "A=here"));
  EXPECT_THAT(forwarded_environment(environment, here.path(), here.path()), ElementsAre("NCCL_DEBUG=INFO", "A=here"));
  EXPECT_THAT(forwarded_environment({"DS_ENV_FILE=mine"}, home.path(), here.path()), ElementsAre("B=mine"));
  EXPECT_THAT(forwarded_environment({"DS_ENV_FILE=" + (here / "mine")}, home.path(), home.path()),
              ElementsAre("B=mine"));
  EXPECT_THAT(forwarded_environment({}, "/no/such/home", "/no/such/folder"), IsEmpty());
  EXPECT_THAT(test::thrown_by<Error>([&] { forwarded_environment({"DS_ENV_FILE=x"}, home.path(), here.path()); }),
              HasSubstr("DS_ENV_FILE=x: there is no such file"));
}

TEST(ForwardedEnvironment, ALaterEntryWins) {
  EXPECT_THAT(with_entries({"A=0", "AB=0"}, {"A=1", "C=1", "A=2"}), ElementsAre("AB=0", "C=1", "A=2"));
}

}  // namespace
}  // namespace ds::launcher
