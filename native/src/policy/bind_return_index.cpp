#include "policy/bind.h"
#include "policy/return_index.h"

namespace nb = nanobind;

namespace kvterrace::policy {

void bind_return_index(nb::module_& m) {
  nb::class_<ReturnIndex, Directory>(m, "ReturnIndex")
      .def(nb::init<std::size_t, std::uint64_t>(), nb::arg("capacity"), nb::arg("seed") = 0)
      .def_prop_ro("follows_arc", &ReturnIndex::follows_arc);
}

}  // namespace kvterrace::policy
