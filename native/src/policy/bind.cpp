#include "policy/bind.h"

#include <nanobind/ndarray.h>

#include <cstring>
#include <memory>

#include "policy/directory.h"

namespace nb = nanobind;

namespace kvterrace {
namespace policy {
namespace {

using Keys = nb::ndarray<const Key, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using KeyArray = nb::ndarray<nb::numpy, Key, nb::ndim<1>>;
using BoolArray = nb::ndarray<nb::numpy, bool, nb::ndim<1>>;

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> array(std::size_t count, std::unique_ptr<T[]> values) {
  T* data = values.release();
  nb::capsule owner(data, [](void* at) noexcept { delete[] static_cast<T*>(at); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {count}, owner);
}

std::span<const Key> span_of(const Keys& keys) { return {keys.data(), keys.shape(0)}; }

KeyArray take(Directory& directory) {
  const std::vector<Key> gone = directory.take_evicted();
  auto values = std::make_unique<Key[]>(gone.size());
  if (!gone.empty()) std::memcpy(values.get(), gone.data(), gone.size() * sizeof(Key));
  return array(gone.size(), std::move(values));
}

}  // namespace
}  // namespace policy

void bind_policy(nb::module_& m) {
  using namespace policy;
  nb::class_<Directory>(m, "Directory")
      .def(
          "request",
          [](Directory& self, const Keys& keys, double now_s, std::int32_t output_tokens, bool extend) {
            self.request({span_of(keys), now_s, output_tokens, extend});
          },
          nb::arg("keys"), nb::arg("now_s"), nb::kw_only(), nb::arg("output_tokens") = -1, nb::arg("extend") = false)
      .def("inside",
           [](const Directory& self, const Keys& keys) {
             auto values = std::make_unique<bool[]>(keys.shape(0));
             for (std::size_t at = 0; at < keys.shape(0); ++at) values[at] = self.inside(keys.data()[at]);
             return array(keys.shape(0), std::move(values));
           })
      .def("take_evicted", take)
      .def("evict",
           [](Directory& self, std::size_t n) {
             self.evict(n);
             return take(self);
           })
      .def("forget",
           [](Directory& self, const Keys& keys) {
             for (const Key key : span_of(keys)) self.forget(key);
           })
      .def("resize", &Directory::resize)
      .def("__len__", &Directory::size)
      .def_prop_ro("nbytes", &Directory::nbytes);
  bind_references(m);
  bind_return_index(m);
  bind_key_map(m);
}

}  // namespace kvterrace
