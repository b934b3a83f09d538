#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "policy/bind.h"
#include "policy/return_index.h"

namespace nb = nanobind;

namespace kvterrace::policy {
namespace {

Hint hint_of(const std::string& kind) {
  if (kind == "closed") return Hint::kClosed;
  if (kind == "one_off") return Hint::kOneOff;
  if (kind == "returns") return Hint::kReturns;
  if (kind == "shared") return Hint::kShared;
  if (kind == "priority") return Hint::kPriority;
  throw std::invalid_argument("kind must be closed, one_off, returns, shared or priority, not '" + kind + "'");
}

}  // namespace

void bind_return_index(nb::module_& m) {
  nb::class_<ReturnIndex, Directory>(m, "ReturnIndex")
      .def(nb::init<std::size_t, std::uint64_t>(), nb::arg("capacity"), nb::arg("seed") = 0)
      .def(
          "hint",
          [](ReturnIndex& self, Key key, const std::string& kind, double seconds, double now_s) {
            self.hint(key, hint_of(kind), seconds, now_s);
          },
          nb::arg("key"), nb::arg("kind"), nb::arg("seconds"), nb::arg("now_s"))
      .def_prop_ro("follows_arc", &ReturnIndex::follows_arc);
}

}  // namespace kvterrace::policy
