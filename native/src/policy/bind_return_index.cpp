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

// Both take the same calls; the policy without its gate is there for tests.
template <typename T>
nb::class_<T, Directory> bind(nb::module_& m, const char* name) {
  return nb::class_<T, Directory>(m, name)
      .def(nb::init<std::size_t, std::uint64_t, double>(), nb::arg("capacity"), nb::arg("seed") = 0, nb::arg("depth_worth") = 0.0)
      .def(
          "hint",
          [](T& self, Key key, const std::string& kind, double seconds, double now_s) {
            self.hint(key, hint_of(kind), seconds, now_s);
          },
          nb::arg("key"), nb::arg("kind"), nb::arg("seconds"), nb::arg("now_s"));
}

}  // namespace

void bind_return_index(nb::module_& m) {
  bind<IndexDirectory>(m, "IndexDirectory");
  bind<ReturnIndex>(m, "ReturnIndex").def_prop_ro("follows_arc", &ReturnIndex::follows_arc);
}

}  // namespace kvterrace::policy
