#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "policy/bind.h"
#include "policy/key_map.h"
#include "policy/replay.h"

namespace nb = nanobind;

namespace kvterrace::policy {
namespace {

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>>;

template <class T>
std::span<const T> span_of(const In<T>& array) {
  return {array.data(), array.shape(0)};
}

// A directory of a policy that is known by its name. Belady's has no meaning without a trace.
Directory* reference(const std::string& name, std::size_t capacity) {
  if (capacity == 0) throw std::invalid_argument("a directory has room for one key at least");
  auto made = make_reference(name, capacity);
  if (!made) throw std::invalid_argument(name + " is no reference policy that decides without foresight");
  return made.release();
}

// Numbers from 0 on for keys, in the order in which they first come.
nb::tuple numbered(const In<Key>& keys) {
  const auto all = span_of(keys);
  auto ids = std::make_unique<std::uint32_t[]>(all.size());
  KeyMap map;
  for (std::size_t at = 0; at < all.size(); ++at) {
    std::uint32_t id = map.find(all[at]);
    if (id == kNone) {
      id = static_cast<std::uint32_t>(map.size());
      map.set(all[at], id);
    }
    ids[at] = id;
  }
  std::uint32_t* data = ids.release();
  nb::capsule owner(data, [](void* at) noexcept { delete[] static_cast<std::uint32_t*>(at); });
  return nb::make_tuple(Ids(data, {all.size()}, owner), map.size());
}

class BoundReplay {
 public:
  BoundReplay(In<std::uint32_t> ids, In<std::uint64_t> offsets, In<std::uint32_t> tokens, std::size_t distinct,
              std::uint32_t block_tokens, const std::string& policy, std::size_t upper, std::size_t lower)
      : ids_(std::move(ids)),
        offsets_(std::move(offsets)),
        tokens_(std::move(tokens)),
        replay_(checked({span_of(ids_), span_of(offsets_), span_of(tokens_), distinct, block_tokens}, policy, upper),
                policy, upper, lower) {}

  std::size_t run(std::size_t requests) {
    nb::gil_scoped_release release;
    return replay_.run(requests);
  }

  nb::dict counts() const {
    const Tally& tally = replay_.tally();
    nb::dict found;
    found["requests"] = tally.requests;
    found["blocks"] = tally.blocks;
    found["tokens"] = tally.tokens;
    found["tokens_squared"] = tally.tokens_squared;
    found["upper_hits"] = tally.hits[0];
    found["lower_hits"] = tally.hits[1];
    found["upper_hit_tokens"] = tally.hit_tokens[0];
    found["lower_hit_tokens"] = tally.hit_tokens[1];
    found["hit_tokens_squared"] = tally.hit_tokens_squared;
    found["missed_new"] = tally.missed_new;
    found["missed_dropped"] = tally.missed_dropped;
    found["missed_behind"] = tally.missed_behind;
    found["promoted"] = tally.promoted;
    found["demoted"] = tally.demoted;
    found["written"] = tally.written;
    found["copies_lost"] = tally.copies_lost;
    found["dropped"] = tally.dropped;
    return found;
  }

  std::size_t nbytes() const { return replay_.nbytes(); }

 private:
  static Trace checked(const Trace& trace, const std::string& policy, std::size_t upper) {
    const auto refuse = [](const std::string& why) { throw std::invalid_argument(why); };
    const auto& offsets = trace.offsets;
    if (offsets.size() != trace.tokens.size() + 1) refuse("one offset more than there are requests is needed");
    if (offsets.front() != 0 || offsets.back() != trace.ids.size() || !std::is_sorted(offsets.begin(), offsets.end()))
      refuse("offsets go from 0 up to the number of ids");
    if (std::any_of(trace.ids.begin(), trace.ids.end(), [&](auto id) { return id >= trace.distinct; }))
      refuse("an id is not below the number of different ones");
    if (trace.block_tokens == 0 || upper == 0) refuse("blocks of no tokens, or a tier without room");
    const Foresight none({}, 0);
    if (!make_reference(policy, 1, &none)) refuse(policy + " is no reference policy");
    return trace;
  }

  In<std::uint32_t> ids_;
  In<std::uint64_t> offsets_;
  In<std::uint32_t> tokens_;
  Replay replay_;
};

}  // namespace

void bind_references(nb::module_& m) {
  m.def("reference", &reference, nb::arg("name"), nb::arg("capacity"), nb::rv_policy::take_ownership);
  m.def("numbered", &numbered, nb::arg("keys"));
  nb::class_<BoundReplay>(m, "ReferenceReplay")
      .def(nb::init<In<std::uint32_t>, In<std::uint64_t>, In<std::uint32_t>, std::size_t, std::uint32_t,
                    const std::string&, std::size_t, std::size_t>(),
           nb::arg("ids"), nb::arg("offsets"), nb::arg("tokens"), nb::arg("distinct"), nb::arg("block_tokens"),
           nb::arg("policy"), nb::arg("upper"), nb::arg("lower"))
      .def("run", &BoundReplay::run, nb::arg("requests"))
      .def("counts", &BoundReplay::counts)
      .def_prop_ro("nbytes", &BoundReplay::nbytes);
}

}  // namespace kvterrace::policy
