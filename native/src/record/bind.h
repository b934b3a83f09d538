// Helpers of the bindings: checks that answer in Python's words, and what keeps Python's memory alive.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "hooks.h"

namespace kvterrace {

// Adds this room to the package's module, where `Hook` is bound before.
void bind_record(nanobind::module_& module);

}  // namespace kvterrace

namespace kvterrace::record {

namespace nb = nanobind;

[[noreturn]] inline void refuse(const std::string& reason) { throw nb::value_error(reason.c_str()); }

// Memory that a Python object lends, for as long as this lives. Made and destroyed with the GIL.
class Loan {
 public:
  Loan(nb::handle owner, int flags) {
    if (PyObject_GetBuffer(owner.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Loan() { PyBuffer_Release(&view_); }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  Memory memory() const noexcept { return {static_cast<std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)}; }

 private:
  Py_buffer view_;
};

template <std::size_t nbytes>
std::array<std::uint8_t, nbytes> fixed(const nb::bytes& value, const char* what) {
  if (value.size() != nbytes)
    refuse(std::string(what) + " takes " + std::to_string(nbytes) + " B, not " + std::to_string(value.size()) + " B");
  std::array<std::uint8_t, nbytes> made;
  std::memcpy(made.data(), value.data(), nbytes);
  return made;
}

// The parts of `bind_record`.
void bind_sums(nb::module_& module);
void bind_places(nb::module_& module);
void bind_hooks(nb::module_& module);

// A caller's memory, and the arrays that own it.
struct OwnedPlaces {
  Places places;
  bool writable;
  nb::object arrays, owner;
};

}  // namespace kvterrace::record
