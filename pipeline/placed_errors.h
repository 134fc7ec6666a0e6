// Errors of what the program gives a pipeline (layers, hooks, the loss, the source) with the place where they arose.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <new>
#include <string>

#include "core/check.h"

namespace ds::pipeline {

// Returns what `action` returns. `place` returns a text that goes before the message of an exception, `more` one that
// goes behind it. IoError and ConfigError keep their type, other exceptions become UsageError; what was thrown is
// nested in it (std::rethrow_if_nested). Errors of other ranks, of the library itself and of a lack of memory pass as
// they are.
template <class Place, class More, class Action>
auto with_place(const Place& place, const More& more, const Action& action) {
  try {
    return action();
  } catch (const CommError&) {
    throw;
  } catch (const InternalError&) {
    throw;
  } catch (const NonFiniteError&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const IoError& error) {
    std::throw_with_nested(IoError(cat(place(), error.what(), more())));
  } catch (const ConfigError& error) {
    std::throw_with_nested(ConfigError(cat(place(), error.what(), more())));
  } catch (const c10::Error& error) {
    std::throw_with_nested(UsageError(cat(place(), error.what_without_backtrace(), more())));
  } catch (const std::exception& error) {
    std::throw_with_nested(UsageError(cat(place(), error.what(), more())));
  }
}

// Does the same with nothing behind the message.
template <class Place, class Action>
auto with_place(const Place& place, const Action& action) {
  return with_place(
      place, [] { return ""; }, action);
}

}  // namespace ds::pipeline
