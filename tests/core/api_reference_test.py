#!/usr/bin/env python3
"""docs/api is what the headers say, and scripts/api_reference sees what changes, on a small header.

  api_reference_test.py SOURCE-FOLDER
"""
import pathlib
import subprocess
import sys
import tempfile

HEADER = """// Boxes, for a test. See docs/boxes.md.
//
//   Box box(1);
#pragma once

#include <string>

namespace ds {

struct Elsewhere;  // nobody's business

namespace internal {
void not_shown() { if (true) { } }
}  // namespace internal

// What a box may hold, in < pieces >.
struct Limits {
  int most = 3;  // pieces
  std::string name = "a { brace; and // slashes";
  bool full() const { return most == 0; }
};

enum class Colour { kRed, kBlue };

class LidImpl : public Module {};
TORCH_MODULE(Lid);

// A box.
class Box {
 public:
  struct Hidden;
  // --- making one ------------------------------------
  explicit Box(int size) : size_(size) {}
  explicit Box(Hidden* hidden);
  Box(const Box&) = delete;
  ~Box() = default;
  // Adds `count`.
  //   * never more than fit;
  //   * or none.
  template <class Piece>
  void add(const Piece& piece, int count = {1}) {
    for (int i = 0; i < count; ++i) size_ += piece;
  }
  int size() const { return size_; }  // pieces

 private:
  // Not shown.
  void grow();
  int size_ = 0;
};

}  // namespace ds
"""

EXPECTED = [
    "Boxes, for a test. See [docs/boxes.md](../boxes.md).",
    "Box box(1);",
    "In namespace `ds`:",
    "### struct Limits\n\nWhat a box may hold, in \\< pieces >.",
    "  int most = 3;  // pieces\n",
    '  std::string name = "a { brace; and // slashes";\n',
    "  bool full() const;\n",
    "### enum Colour",
    "enum class Colour { kRed, kBlue };",
    "### class LidImpl\n\n```cpp\nclass LidImpl : public Module;\n```\n\n### Lid\n",
    "### class Box\n\nA box.",
    "#### Making one",
    "explicit Box(int size);\n",
    "template <class Piece>\nvoid add(const Piece& piece, int count = {1});\n",
    "int size() const;  // pieces\n",
    "Adds `count`.\n\n* never more than fit;\n* or none.\n",
]
LEFT_OUT = ["not_shown", "Hidden", "Elsewhere", "delete", "~Box", "grow", "size_", "Not shown", "nobody"]


def run(*arguments, expected):
    command = [sys.executable, f"{SOURCE}/scripts/api_reference", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if (done.returncode == 0) != expected:
        sys.exit(f"api_reference {arguments}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def check(condition, what, text):
    if not condition:
        sys.exit(f"{what}\n{text}")


def small_tree(folder):
    header = folder / "include/dsengine/errors.h"
    header.parent.mkdir(parents=True)
    header.write_text(HEADER)
    (folder / "docs").mkdir()
    (folder / "docs/boxes.md").write_text("# Boxes\n")
    run("--root", str(folder), expected=True)
    run("--root", str(folder), "--check", expected=True)
    page = (folder / "docs/api/engine.md").read_text()
    for text in EXPECTED:
        check(text in page, f"expected on the page: {text}", page)
    for text in LEFT_OUT:
        check(text not in page, f"not to be on the page: {text}", page)
    header.write_text(HEADER.replace("// A box.", "// Another box."))
    told = run("--root", str(folder), "--check", expected=False)
    check("+Another box." in told and "run scripts/api_reference" in told, "expected what differs and what to do", told)
    header.write_text(HEADER.replace("int size_ = 0;", "#if 1"))
    line = HEADER.count("\n", 0, HEADER.index("int size_ = 0;")) + 1
    told = run("--root", str(folder), expected=False)
    check(f"errors.h:{line}" in told, f"expected line {line}", told)
    header.write_text(HEADER)
    (header.parent / "unheard_of.h").write_text("// New.\n")
    check("unheard_of.h" in run("--root", str(folder), expected=False), "expected the header without a page", "")


SOURCE = sys.argv[1]
run("--check", expected=True)
with tempfile.TemporaryDirectory() as scratch:
    small_tree(pathlib.Path(scratch))
