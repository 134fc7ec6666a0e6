// Loaded in front of a program (LD_PRELOAD), this makes it one that takes the locale of its user at the start of
// main(), as programs with windows do: setlocale() for C and std::locale::global() for C++.
#include <dlfcn.h>

#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>  // std::cout is made before, and keeps its own
#include <locale>
#include <stdexcept>

namespace {

using Main = int (*)(int, char**, char**);
using Start = int (*)(Main, int, char**, void (*)(), void (*)(), void (*)(), void*);

Main program_main = nullptr;

int main_under_locale(int argc, char** argv, char** environment) {
  try {
    if (std::setlocale(LC_ALL, "") == nullptr) throw std::runtime_error("setlocale() does not know it");
    std::locale::global(std::locale(""));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "the locale of LC_ALL and LOCPATH cannot be used: %s\n", error.what());
    return EXIT_FAILURE;
  }
  return program_main(argc, argv, environment);
}

}  // namespace

// glibc's, in front of its own.
extern "C" __attribute__((visibility("default"))) int __libc_start_main(Main main, int argc, char** argv,
                                                                        void (*init)(), void (*fini)(),
                                                                        void (*rtld_fini)(), void* end) {
  program_main = main;
  const auto start = reinterpret_cast<Start>(dlsym(RTLD_NEXT, "__libc_start_main"));
  return start(&main_under_locale, argc, argv, init, fini, rtld_fini, end);
}
