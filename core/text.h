// Building text from parts, and streams whose numbers a machine reads. Torch-free.
//
// None of it follows the locale of the program (std::locale::global, setlocale): a number has a decimal point and no
// groups of digits, also in a program whose windows show "1.234,5". Streams of our own are made by classic_stream();
// letters are compared by core/ascii.h; what a library reads by the C library's locale stands in a ClassicScope
// (core/classic_scope.h).
//
// A part is anything that has operator<<. What a part costs is paid where the text is built: a value that names a thing
// (a view, lazy(), Printable) costs nothing in a check that holds.
#pragma once

#include <iomanip>
#include <locale>
#include <ostream>
#include <sstream>
#include <string>
#include <utility>

namespace ds {

// Makes a stream (std::ostringstream, std::ifstream, ...) that reads and writes numbers as the C locale does.
template <class Stream, class... Arguments>
Stream classic_stream(Arguments&&... arguments) {
  Stream stream(std::forward<Arguments>(arguments)...);
  stream.imbue(std::locale::classic());
  return stream;
}

// Joins anything that has operator<<: cat("rank ", 3, " of ", 4).
template <class... Parts>
std::string cat(const Parts&... parts) {
  auto out = classic_stream<std::ostringstream>();
  (out << ... << parts);
  return std::move(out).str();
}

// A part whose text is made when it is written, and not before: lazy([&] { return list_of(names); }).
template <class Make>
class Lazy {
 public:
  explicit Lazy(Make make) : make_(std::move(make)) {}
  friend std::ostream& operator<<(std::ostream& out, const Lazy& part) { return out << part.make_(); }

 private:
  Make make_;
};

template <class Make>
Lazy<Make> lazy(Make make) {
  return Lazy<Make>(std::move(make));
}

// A reference to any part, for a function that names it in a message only when it throws. The part must outlive it,
// which arguments of a call do.
class Printable {
 public:
  template <class Part>
  Printable(const Part& part) : part_(&part), write_(&write<Part>) {}  // NOLINT(google-explicit-constructor): any part
  friend std::ostream& operator<<(std::ostream& out, const Printable& part) {
    part.write_(out, part.part_);
    return out;
  }

 private:
  template <class Part>
  static void write(std::ostream& out, const void* part) {
    out << *static_cast<const Part*>(part);
  }

  const void* part_;
  void (*write_)(std::ostream& out, const void* part);
};

// Formats a number with so many digits after the point: fixed(2.5, 2) is "2.50".
inline std::string fixed(double value, int digits) {
  auto out = classic_stream<std::ostringstream>();
  out << std::fixed << std::setprecision(digits) << value;
  return std::move(out).str();
}

}  // namespace ds
