#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "bind.h"

namespace kvterrace::record {
namespace {

// An item of a hook, and the Python objects whose memory it points into.
template <class Item>
struct Owned : Item {
  Owned(Item item, std::shared_ptr<Loan> lent, nb::object of_shape, nb::object of_claims, nb::object of_places)
      : Item(std::move(item)),
        loan(std::move(lent)),
        owners{std::move(of_shape), std::move(of_claims), std::move(of_places)} {}

  std::shared_ptr<Loan> loan;
  nb::object owners[3];
};

// A hook and its items. Destroyed with the GIL, as any Python object is.
template <class HookType, class Item>
struct OwnedHook : HookType {
  explicit OwnedHook(const nb::list& list) : HookType(pointers(list)), items(nb::tuple(list)) {}

  static std::vector<Item*> pointers(const nb::list& list) {
    std::vector<Item*> made;
    made.reserve(list.size());
    for (nb::handle item : list) made.push_back(nb::cast<Owned<Item>*>(item));
    return made;
  }

  nb::tuple items;
};

template <class HookType, class Item>
void bind_hook(nb::module_& module, const char* name, const char* text) {
  using Bound = OwnedHook<HookType, Item>;
  nb::class_<Bound, Hook>(module, name, text)
      .def(nb::init<const nb::list&>(), nb::arg("items"));
}

Target target_of(const nb::object& places, std::size_t block, const nb::object& claims, std::size_t claim,
                 const RecordShape& shape) {
  if (places.is_none()) return {};
  if (claims.is_none()) refuse("places without claims: nobody would know who may copy");
  const Places& all = nb::cast<OwnedPlaces&>(places).places;
  Claims& states = nb::cast<Claims&>(claims);
  if (block >= all.blocks() || claim >= states.size())
    refuse("no block " + std::to_string(block) + " of " + std::to_string(all.blocks()) + ", or no claim " +
           std::to_string(claim) + " of " + std::to_string(states.size()));
  const auto wanted = all.part_nbytes();
  const auto& known = shape.part_nbytes;
  if (all.first_part() > known.size() || wanted.size() > known.size() - all.first_part() ||
      !std::equal(wanted.begin(), wanted.end(), known.begin() + static_cast<std::ptrdiff_t>(all.first_part())))
    refuse("the caller's parts are not those of this layout");
  return Target{&all, block, &states, claim};
}

std::shared_ptr<Loan> record_loan(nb::handle memory, const RecordShape& shape) {
  auto loan = std::make_shared<Loan>(memory, PyBUF_WRITABLE);
  if (loan->memory().nbytes < shape.record_nbytes())
    refuse("a record of " + std::to_string(shape.record_nbytes()) + " B does not fit " +
           std::to_string(loan->memory().nbytes) + " B");
  return loan;
}

void require_writable(const nb::object& places) {
  if (!places.is_none() && !nb::cast<OwnedPlaces&>(places).writable) refuse("the caller's memory is read-only");
}

using Range = std::optional<std::pair<std::int64_t, std::int64_t>>;

void make_landing(Owned<Landing>* self, nb::handle memory, const nb::object& shape, const nb::bytes& key,
                  std::uint64_t put_seq, const nb::bytes& nonce, std::uint64_t offset, const nb::object& places,
                  std::size_t block, const nb::object& claims, std::size_t claim, const Range& parts,
                  std::int64_t base) {
  const auto& known = nb::cast<RecordShape&>(shape);
  const Target target = target_of(places, block, claims, claim, known);
  require_writable(places);
  PartRange range;
  if (parts) range = {false, parts->first, parts->second};
  if (base < 0 || (parts && (range.start < 0 || range.stop < range.start))) refuse("parts and base cannot be negative");
  if (target.places != nullptr && parts) {
    const auto first = static_cast<std::int64_t>(target.places->first_part());
    const auto stop = first + static_cast<std::int64_t>(target.places->part_nbytes().size());
    if (first < range.start || stop > range.stop) refuse("what is copied to the caller must be among what is verified");
  }
  auto loan = std::make_shared<Loan>(memory, PyBUF_WRITABLE);
  const Identity identity{fixed<32>(key, "key"), put_seq, fixed<16>(nonce, "nonce"), offset};
  const Landing landing{loan->memory(), &known, identity, range, base, target, Landed::unseen, false, {}};
  new (self) Owned<Landing>(landing, loan, shape, claims, places);
}

void make_copy(Owned<Copy>* self, nb::handle slot, const nb::object& shape, const nb::object& places, std::size_t block,
               const nb::object& claims, std::size_t claim) {
  const auto& known = nb::cast<RecordShape&>(shape);
  require_writable(places);
  auto loan = record_loan(slot, known);
  const Copy copy{loan->memory(), &known, target_of(places, block, claims, claim, known), false};
  new (self) Owned<Copy>(copy, loan, shape, claims, places);
}

void make_fill(Owned<Fill>* self, nb::handle slot, const nb::object& shape, const nb::bytes& key,
               const nb::bytes& parent, std::uint32_t depth, const nb::bytes& sequence, std::uint64_t put_seq,
               std::uint64_t created_unix_ns, const nb::object& places, std::size_t block, const nb::object& claims,
               std::size_t claim) {
  const auto& known = nb::cast<RecordShape&>(shape);
  auto loan = record_loan(slot, known);
  const Target target = target_of(places, block, claims, claim, known);
  if (target.places == nullptr || target.places->part_nbytes().size() != known.part_nbytes.size())
    refuse("a put takes all parts of a block");
  const NewBlock made{fixed<32>(key, "key"), fixed<32>(parent, "parent"), fixed<16>(sequence, "sequence"), put_seq,
                      created_unix_ns, depth};
  new (self) Owned<Fill>(Fill{loan->memory(), &known, made, target, false}, loan, shape, claims, places);
}

nb::tuple fault_of(const Owned<Landing>& one) {
  const Fault& fault = one.fault;
  const auto& n = fault.numbers;
  return nb::make_tuple(static_cast<int>(fault.reason), nb::make_tuple(n[0], n[1], n[2], n[3], n[4]),
                        nb::bytes(fault.found.data(), fault.found.size()));
}

}  // namespace

void bind_hooks(nb::module_& module) {
  nb::class_<Owned<Landing>>(module, "Landing", "A record on its way into memory, and what it must turn out to be.")
      .def("__init__", &make_landing, nb::arg("memory"), nb::arg("shape"), nb::arg("key"), nb::arg("put_seq"),
           nb::arg("nonce"), nb::arg("offset"), nb::kw_only(), nb::arg("places") = nb::none(), nb::arg("block") = 0,
           nb::arg("claims") = nb::none(), nb::arg("claim") = 0, nb::arg("parts") = nb::none(), nb::arg("base") = 0,
           "`memory`: header, then the payload from its offset `base` on. `parts`: (start, stop) of those to verify, or "
           "all. `places`: None to promote only.")
      .def_prop_ro("landed", [](const Owned<Landing>& one) { return static_cast<int>(one.landed); })
      .def_prop_ro("copied", [](const Owned<Landing>& one) { return one.copied; })
      .def_prop_ro("fault", &fault_of, "(reason, its numbers, bytes found): `kvterrace.format.passes` has the words.");

  nb::class_<Owned<Copy>>(module, "Copy", "A block on its way from a slot to the caller.")
      .def("__init__", &make_copy, nb::arg("slot"), nb::arg("shape"), nb::kw_only(), nb::arg("places"),
           nb::arg("block"), nb::arg("claims"), nb::arg("claim"))
      .def_prop_ro("copied", [](const Owned<Copy>& one) { return one.copied; });

  nb::class_<Owned<Fill>>(module, "Fill", "A block on its way from the caller into a slot.")
      .def("__init__", &make_fill, nb::arg("slot"), nb::arg("shape"), nb::arg("key"), nb::arg("parent"),
           nb::arg("depth"), nb::arg("sequence"), nb::arg("put_seq"), nb::arg("created_unix_ns"), nb::kw_only(),
           nb::arg("places"), nb::arg("block"), nb::arg("claims"), nb::arg("claim"))
      .def_prop_ro("done", [](const Owned<Fill>& one) { return one.done; });

  bind_hook<ReadHook, Landing>(module, "ReadHook", "Verify what one read brought, and scatter what is right.");
  bind_hook<VerifyHook, Landing>(module, "VerifyHook", "The same for bytes that are in memory already.");
  bind_hook<CopyHook, Copy>(module, "CopyHook", "Scatter blocks from their slots.");
  bind_hook<FillHook, Fill>(module, "FillHook", "Gather blocks into their slots, sum them and write their headers.");
}

}  // namespace kvterrace::record
