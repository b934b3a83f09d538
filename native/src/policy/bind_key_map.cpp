#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <stdexcept>

#include "policy/bind.h"
#include "policy/block_map.h"

namespace nb = nanobind;

namespace kvterrace::policy {
namespace {

using Column = nb::ndarray<const Key, nb::ndim<1>, nb::device::cpu>;
using Keys = nb::ndarray<const Key, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdArray = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;

KeyColumn column_of(const Column& keys) { return {keys.data(), static_cast<std::size_t>(keys.stride(0))}; }

template <typename Each>
void each(BlockMap& self, const Ids& ids, const Column& keys, Each&& call) {
  self.look_at(column_of(keys));
  for (std::size_t at = 0; at < ids.shape(0); ++at) {
    const std::int32_t id = ids.data()[at];
    if (id < 0 || static_cast<std::size_t>(id) >= keys.shape(0)) throw std::out_of_range("an id is not in the column");
    call(static_cast<std::uint32_t>(id));
  }
}

}  // namespace

void bind_key_map(nb::module_& m) {
  nb::class_<BlockMap>(m, "KeyMap")
      .def(nb::init<>())
      .def(
          "put",
          [](BlockMap& self, const Ids& ids, const Column& keys) {
            each(self, ids, keys, [&](std::uint32_t id) { self.put(id); });
          },
          nb::arg("ids"), nb::arg("keys"))
      .def(
          "drop",
          [](BlockMap& self, const Ids& ids, const Column& keys) {
            each(self, ids, keys, [&](std::uint32_t id) { self.drop(id); });
          },
          nb::arg("ids"), nb::arg("keys"))
      .def(
          "find",
          [](BlockMap& self, const Keys& wanted, const Column& keys) {
            self.look_at(column_of(keys));
            auto found = std::make_unique<std::int32_t[]>(wanted.shape(0));
            for (std::size_t at = 0; at < wanted.shape(0); ++at)
              found[at] = static_cast<std::int32_t>(self.find(wanted.data()[at]));  // kNowhere is -1
            std::int32_t* data = found.release();
            nb::capsule owner(data, [](void* it) noexcept { delete[] static_cast<std::int32_t*>(it); });
            return IdArray(data, {wanted.shape(0)}, owner);
          },
          nb::arg("wanted"), nb::arg("keys"))
      .def_prop_ro("nbytes", &BlockMap::nbytes);
}

}  // namespace kvterrace::policy
